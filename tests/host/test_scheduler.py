"""Exact plans: who runs, on which tokens, in which blocks."""

from host_harness import answer, make_request, make_scheduler, run

from pagedjax.host import KVUsage, ScheduledChunk, SequenceUpdate, StepPlan, StepResult


def prefill(seq_id, slot, tokens, blocks, *, start=0, samples=True):
    fresh = start == 0
    return ScheduledChunk(seq_id, slot, start, len(tokens), tokens, 0, blocks if fresh else (), samples, fresh)


def decode(seq_id, slot, start, first_block=0, blocks=()):
    return ScheduledChunk(seq_id, slot, start, 1, (), first_block, blocks, True, False)


def brief(plan):
    return [(chunk.seq_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def test_one_request_from_prompt_to_end():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    request = make_request(0, prompt_len=3, max_tokens=4)
    scheduler.add(request)
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)
    prompt = request.prompt_token_ids
    assert run(scheduler, 21) == (StepPlan(0, (prefill(0, 1, prompt, (1,)),), 3), [SequenceUpdate(0, 21, None)])
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    assert run(scheduler, 22) == (StepPlan(1, (decode(0, 1, 3),), 1), [SequenceUpdate(0, 22, None)])
    seq = scheduler.get("r0").sequences[0]
    assert run(scheduler, 23) == (StepPlan(2, (decode(0, 1, 4, 1, (2,)),), 1), [SequenceUpdate(0, 23, None)])
    assert run(scheduler, 24) == (StepPlan(3, (decode(0, 1, 5),), 1), [SequenceUpdate(0, 24, "length")])
    assert seq.token_ids == [*prompt, 21, 22, 23, 24]
    assert (seq.finish_reason, seq.stop_reason, seq.output_len) == ("length", None, 4)
    assert not scheduler.has_unfinished()
    assert scheduler.schedule() is None
    assert scheduler.num_steps == 4
    assert scheduler.usage() == KVUsage(0, 0, 0, 0, 16)


def test_prefills_and_decodes_share_a_step_in_order_of_arrival():
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    requests = [make_request(number, length) for number, length in enumerate((5, 3, 4))]
    scheduler.add(requests[0])
    run(scheduler)
    scheduler.add(requests[1])
    scheduler.add(requests[2])
    plan, updates = run(scheduler)
    assert plan.chunks == (
        decode(0, 1, 5),
        prefill(1, 2, requests[1].prompt_token_ids, (3,)),
        prefill(2, 3, requests[2].prompt_token_ids, (4,)),
    )
    assert plan.num_tokens == 8
    assert [update.seq_id for update in updates] == [0, 1, 2]


def test_a_prompt_is_computed_in_chunks_that_fill_the_step():
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_num_batched_tokens=6)
    first, second = make_request(0, 4), make_request(1, 11)
    scheduler.add(first)
    scheduler.add(second)
    tokens = second.prompt_token_ids
    plan, updates = run(scheduler)
    # All blocks of the prompt come with its first chunk, so that it cannot run out of them halfway.
    assert plan.chunks == (
        prefill(0, 1, first.prompt_token_ids, (1,)),
        prefill(1, 2, tokens[:2], (2, 3, 4), samples=False),
    )
    assert [update.seq_id for update in updates] == [0]
    assert scheduler.usage() == KVUsage(4 + 2, 9, 1, 0, 48)
    plan, updates = run(scheduler)
    assert plan.chunks == (decode(0, 1, 4, 1, (5,)), prefill(1, 2, tokens[2:7], (), start=2, samples=False))
    plan, updates = run(scheduler)
    assert plan.chunks == (decode(0, 1, 5), prefill(1, 2, tokens[7:], (), start=7))
    assert [update.seq_id for update in updates] == [0, 1]
    plan, _ = run(scheduler)
    assert plan.chunks == (decode(0, 1, 6), decode(1, 2, 11))


def test_whole_prompts_wait_until_they_fit_the_step():
    scheduler = make_scheduler(16, max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=False)
    for number, length in enumerate((6, 5, 1)):
        scheduler.add(make_request(number, length, max_tokens=3))
    assert brief(run(scheduler)[0]) == [(0, 0, 6)]  # the last would fit, but nobody is skipped
    assert brief(run(scheduler)[0]) == [(0, 6, 1), (1, 0, 5), (2, 0, 1)]


def test_no_more_sequences_run_than_there_are_slots():
    scheduler = make_scheduler(16, max_num_seqs=2)
    for number in range(3):
        scheduler.add(make_request(number, 2, max_tokens=2 + 2 * number))
    assert brief(run(scheduler)[0]) == [(0, 0, 2), (1, 0, 2)]
    assert [update.finish_reason for update in run(scheduler)[1]] == ["length", None]
    plan, _ = run(scheduler)
    assert brief(plan) == [(1, 3, 1), (2, 0, 2)]
    assert plan.chunks[1].slot == 1  # the slot freed last


def test_no_more_sequences_run_than_a_step_has_tokens():
    scheduler = make_scheduler(16, max_num_batched_tokens=2)
    for number in range(3):
        scheduler.add(make_request(number, 1, max_tokens=3))
    assert brief(run(scheduler)[0]) == [(0, 0, 1), (1, 0, 1)]
    assert brief(run(scheduler)[0]) == [(0, 1, 1), (1, 1, 1)]
    assert brief(run(scheduler)[0]) == [(0, 2, 1), (1, 2, 1)]
    assert brief(run(scheduler)[0]) == [(2, 0, 1)]


def test_the_head_of_the_queue_is_never_overtaken():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_request(0, 8))
    run(scheduler)
    scheduler.add(make_request(1, 12))  # 3 blocks, 2 are free
    scheduler.add(make_request(2, 1))
    assert brief(run(scheduler)[0]) == [(0, 8, 1)]


def test_admission_keeps_the_watermark_free_unless_nothing_runs():
    scheduler = make_scheduler(num_blocks=4, block_size=4, watermark=0.25)
    scheduler.add(make_request(0, 15, max_tokens=1))
    scheduler.add(make_request(1, 8))
    scheduler.add(make_request(2, 5))
    assert brief(run(scheduler)[0]) == [(0, 0, 15)]
    assert brief(run(scheduler)[0]) == [(1, 0, 8)]  # 2 of 4 blocks are free: one more than must stay
    assert brief(run(scheduler)[0]) == [(1, 8, 1)]


def test_the_latest_arrival_is_preempted_and_computed_again():
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    for number in range(3):
        scheduler.add(make_request(number, 2, max_tokens=3))
    seq = scheduler.get("r2").sequences[0]
    assert [chunk.new_blocks for chunk in run(scheduler, 20)[0].chunks] == [(1,), (2,), (3,)]
    plan, updates = run(scheduler, 30)
    # The first takes the last block; for the second's the third gives way, in this step already.
    assert plan.chunks == (decode(0, 1, 2, 1, (4,)), decode(1, 2, 2, 1, (3,)))
    assert plan.preempted == (2,)
    assert [update.seq_id for update in updates] == [0, 1]
    assert (scheduler.num_preemptions, seq.num_preemptions, scheduler.num_waiting) == (1, 1, 1)
    run(scheduler, 30)  # the first two end here
    plan, updates = run(scheduler, 40)
    assert plan.chunks == (prefill(2, 2, (*make_request(2, 2).prompt_token_ids, 20), (2, 3)),)
    assert updates == [SequenceUpdate(2, 40, None)]
    assert brief(run(scheduler)[0]) == [(2, 3, 1)]


def test_a_preempted_request_keeps_its_place_in_the_queue():
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    for number in range(2):
        scheduler.add(make_request(number, 4, max_tokens=3))
    run(scheduler)
    scheduler.add(make_request(2, 1, max_tokens=1))
    plan, _ = run(scheduler)  # nobody is admitted in a step that preempts, though one block stays free
    assert (brief(plan), plan.preempted) == ([(0, 4, 1)], (1,))
    run(scheduler)
    assert brief(run(scheduler)[0]) == [(1, 0, 5), (2, 0, 1)]


def test_the_latest_arrival_preempts_itself():
    scheduler = make_scheduler(num_blocks=3, block_size=2)
    scheduler.add(make_request(0, 3, max_tokens=3))
    scheduler.add(make_request(1, 2, max_tokens=3))
    run(scheduler)
    plan, _ = run(scheduler)
    assert (brief(plan), plan.preempted) == ([(0, 3, 1)], (1,))


def test_a_request_that_outgrows_the_pool_ends_with_a_reason_and_the_others_go_on():
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    (seq,) = scheduler.add(make_request(0, 3, max_tokens=20)).sequences
    scheduler.add(make_request(1, 3, max_tokens=2))
    run(scheduler)
    run(scheduler)
    plan, updates = run(scheduler)
    assert (plan.failed, brief(plan)) == ((0,), [(1, 0, 3)])
    assert seq.finish_reason == "error"
    assert seq.stop_reason == ("needs room for 5 tokens, but the whole pool holds 4 (2 blocks of 2 tokens)")
    assert len(seq.token_ids) == 5
    assert [update.seq_id for update in updates] == [1]


def test_a_plan_that_only_reports_has_no_chunks_and_takes_no_answer():
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    scheduler.add(make_request(0, 3, max_tokens=20))
    run(scheduler)
    run(scheduler)
    assert scheduler.schedule() == StepPlan(2, (), 0, (), (0,))
    assert scheduler.num_in_flight == 0
    assert not scheduler.has_unfinished()
    assert scheduler.schedule() is None


def test_the_last_token_needs_no_room():
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    scheduler.add(make_request(0, 4, max_tokens=1))
    assert run(scheduler)[1] == [SequenceUpdate(0, 9, "length")]
    scheduler.add(make_request(1, 3, max_tokens=2))
    run(scheduler)
    assert run(scheduler)[1] == [SequenceUpdate(1, 9, "length")]


def test_a_stop_token_counts_once_min_tokens_are_there():
    scheduler = make_scheduler(4)
    (seq,) = scheduler.add(make_request(0, 2, stop_ids=(5, 6), min_tokens=2)).sequences
    assert run(scheduler, 5)[1] == [SequenceUpdate(0, 5, None)]
    assert run(scheduler, 6)[1] == [SequenceUpdate(0, 6, "stop")]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", None)  # the model's own end needs no naming


def test_the_stop_token_that_the_user_named_is_the_stop_reason():
    scheduler = make_scheduler(4)
    request = make_request(0, 2, stop_ids=(5, 6))
    object.__setattr__(request.params, "stop_token_ids", (6,))
    (seq,) = scheduler.add(request).sequences
    run(scheduler, 6)
    assert (seq.finish_reason, seq.stop_reason) == ("stop", 6)


def test_a_stop_token_as_last_allowed_token_is_a_stop():
    scheduler = make_scheduler(4)
    scheduler.add(make_request(0, 2, max_tokens=1, stop_ids=(5,)))
    assert run(scheduler, 5)[1] == [SequenceUpdate(0, 5, "stop")]


def test_an_error_of_the_device_ends_its_request_alone():
    scheduler = make_scheduler(8)
    seqs = [scheduler.add(make_request(number, 2)).sequences[0] for number in range(2)]
    scheduler.schedule()
    updates = scheduler.update(StepResult(0, [0, 7], {0: "the logits of request 'r0' are not finite"}))
    assert updates == [SequenceUpdate(0, None, "error"), SequenceUpdate(1, 7, None)]
    assert (seqs[0].finish_reason, seqs[0].stop_reason) == ("error", "the logits of request 'r0' are not finite")
    assert seqs[0].output_len == 0
    assert brief(run(scheduler)[0]) == [(1, 2, 1)]


def test_finish_from_outside_frees_at_once():
    scheduler = make_scheduler(8)
    seqs = [scheduler.add(make_request(number, 5)).sequences[0] for number in range(3)]
    run(scheduler)
    scheduler.finish("r1", "stop", "END")
    assert (seqs[1].finish_reason, seqs[1].stop_reason) == ("stop", "END")
    scheduler.abort("r0")
    assert (seqs[0].finish_reason, seqs[0].stop_reason) == ("abort", None)
    assert scheduler.allocator.usage({2: 5}).free == 6 * 4
    assert brief(run(scheduler)[0]) == [(2, 5, 1)]


def test_abort_of_a_waiting_request():
    scheduler = make_scheduler(8, max_num_seqs=1)
    for number in range(3):
        scheduler.add(make_request(number, 5, max_tokens=1))
    scheduler.abort("r1")
    run(scheduler)
    assert brief(run(scheduler)[0]) == [(2, 0, 5)]


def test_an_id_may_be_used_again_when_its_request_is_done():
    scheduler = make_scheduler(8)
    scheduler.add(make_request(0, 2, max_tokens=1))
    run(scheduler)
    (seq,) = scheduler.add(make_request(1, 2, request_id="r0")).sequences
    assert seq.seq_id == 1


def test_the_same_events_give_the_same_plans():
    def events():
        scheduler = make_scheduler(num_blocks=7, block_size=2, max_num_batched_tokens=5)
        plans = []
        for number in range(6):
            scheduler.add(make_request(number, 1 + number % 4, max_tokens=5))
            plans.append(run(scheduler, number)[0])
        scheduler.abort("r4")
        while plan := scheduler.schedule():
            plans.append(plan)
            answer(scheduler, plan)
        return repr(plans)

    assert "preempted=(" in events()
    assert events() == events()
