"""What importing costs: the host side must run where there is neither jax nor numpy."""

import subprocess
import sys

import pytest

import pagedjax


def test_the_host_loads_neither_jax_nor_numpy():
    program = (
        "import sys, pagedjax.host, pagedjax.config, pagedjax.request;"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'jax', 'jaxlib', 'numpy', 'flax'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_gives_its_light_names_without_loading_jax():
    program = (
        "import sys, pagedjax;"
        "from pagedjax import EngineConfig, SamplingParams, Request, RequestOutput, __version__;"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_package_names_what_it_has():
    assert set(pagedjax.__all__) <= set(dir(pagedjax))
    assert pagedjax.__version__[0].isdigit()
    with pytest.raises(AttributeError, match=r"^module 'pagedjax' has no attribute 'BeamSearch'$"):
        pagedjax.BeamSearch  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
