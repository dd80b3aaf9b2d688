import asyncio
from dataclasses import replace

import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.remote.pool import EnginePool
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.errors import EngineError

ONE = SamplingParams(max_new_tokens=1)


def engines(n, **options):
    return [ScriptedEngine(lambda _prompt: range(100), **options) for _ in range(n)]


async def test_requests_of_one_prefix_share_a_server_and_others_spread():
    members = engines(2)
    pool = EnginePool(members)
    await pool.start()
    prompts = [[group, *range(70), member] for group in range(4) for member in range(2)]
    await asyncio.gather(*(pool.generate(prompt, ONE) for prompt in prompts))
    homes = [{call.prompt[0] for call in member.log} for member in members]
    assert homes[0] & homes[1] == set()
    assert {len(home) for home in homes} == {2}
    await pool.stop()


async def test_a_server_that_is_much_busier_loses_its_prefix():
    members = engines(2, latency_s=0.001)
    pool = EnginePool(members)
    await pool.start()
    await asyncio.gather(*(pool.generate([1], SamplingParams(max_new_tokens=5)) for _ in range(40)))
    assert min(len(member.log) for member in members) > 5
    await pool.stop()


async def test_a_dead_server_is_taken_out_and_its_requests_move(caplog):
    members = engines(2, latency_s=0.001)
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    asking = [asyncio.create_task(pool.generate([n], SamplingParams(max_new_tokens=20))) for n in range(6)]
    await asyncio.sleep(0)
    members[0].crash("killed")
    assert [len((await task).token_ids) for task in asking] == [20] * 6
    health = await pool.health()
    assert health.ok  # the other server takes its requests
    assert "server 0 was taken out: killed" in health.detail
    assert [record.message for record in caplog.records] == [f"{health.detail}; its requests go to the others"]
    await pool.stop()


class Lost(ScriptedEngine):
    """Its server, on another machine, is gone for good: every call fails; what waits at its gate hears of nothing."""

    gone = False

    def _check(self):
        super()._check()
        if self.gone:
            raise EngineError("no server answers")


async def waiting_at_a_lost_server(pool, members, sampling):
    """A request of each kind that waits in a pause at server 0, which is then lost, and the tokens of the stream."""
    heard = []

    async def listen():
        async for chunk in pool.stream([2], sampling, session_id="s"):
            heard.extend(chunk.token_ids)

    await pool.pause()
    asking = [asyncio.create_task(pool.generate([1], sampling, session_id="g")), asyncio.create_task(listen())]
    pool._homes |= dict.fromkeys(("g", "s"), pool._members[0])
    for _ in range(5):
        await asyncio.sleep(0)
    assert members[0]._running == 2
    members[0].gone = True
    return asking, heard


@pytest.mark.parametrize("lost_in", ["update_weights", "resume"])
async def test_what_waits_in_a_pause_at_a_server_that_is_lost_moves(lost_in):
    members = [Lost(lambda _prompt: range(100)), *engines(1)]
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    asking, heard = await waiting_at_a_lost_server(pool, members, SamplingParams(max_new_tokens=5))
    members[0].gone = lost_in == "update_weights"
    await pool.update_weights(1, [("w", None)])
    members[0].gone = True
    await pool.resume()
    async with asyncio.timeout(10):
        completion, _ = await asyncio.gather(*asking)
    assert completion.token_ids == heard == [0, 1, 2, 3, 4]
    assert completion.policy_versions == [1] * 5
    assert [len(member.log) for member in members] == [0, 2]
    await pool.stop()


async def test_what_waits_in_a_pause_at_the_last_server_fails_when_that_is_lost():
    members = [Lost(lambda _prompt: range(100))]
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    asking, _ = await waiting_at_a_lost_server(pool, members, ONE)
    with pytest.raises(EngineError, match="no server answers"):
        await pool.update_weights(1, [("w", None)])
    async with asyncio.timeout(10):
        for request in asking:
            with pytest.raises(EngineError, match=r"no server of the pool is left.*no server answers"):
                await request
    await pool.stop()


async def test_a_server_that_misses_its_health_checks_loses_what_waits_there():
    members = [Lost(lambda _prompt: range(100)), *engines(1)]
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    asking, heard = await waiting_at_a_lost_server(pool, members, ONE)
    for _ in range(3):
        await pool._check_all()
    await pool.resume()
    async with asyncio.timeout(10):
        await asyncio.gather(*asking)
    assert heard == [0]
    await pool.stop()


async def test_a_server_whose_health_makes_no_sense_is_a_sick_one_and_the_rest_is_looked_after(caplog):
    class Strange(ScriptedEngine):
        async def health(self):
            raise AttributeError("'list' object has no attribute 'get'")

    members = [Strange(lambda _prompt: range(100)), *engines(1)]
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    for _ in range(3):
        await pool._check_all()
    assert "server 0 was taken out" in caplog.text
    members[1].crash("killed")
    for _ in range(3):
        await pool._check_all()
    assert "server 1 was taken out" in caplog.text
    await pool.stop()


async def test_a_stream_that_said_something_fails_with_its_server():
    """Its listener holds tokens that another server would say anew."""
    members = [Lost(lambda _prompt: range(100)), *engines(1)]
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    stream = pool.stream([1], SamplingParams(max_new_tokens=5))
    assert (await anext(stream)).token_ids == [0]
    await pool.pause()
    members[0].gone = True
    await pool.resume()
    with pytest.raises(EngineError, match=r"server 0 was taken out: no server answers"):
        await anext(stream)
    await pool.stop()


async def test_a_server_does_not_return_while_the_pool_is_paused(caplog):
    """It would sample while the others load, and be left with the weights of before."""
    members = engines(2)
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    pool._take_out(pool._members[0], EngineError("it did not pause"))
    await pool.pause()
    await pool._check_all()
    assert pool._members[0].fault is not None
    await pool.resume()
    assert "is back" not in caplog.text
    await pool._check_all()
    assert pool._members[0].fault is None
    assert caplog.messages[-1] == "server 0 of the pool is back"
    await pool.stop()


async def test_a_server_does_not_return_in_a_pause_that_begins_while_it_is_let_go_on():
    class Returning(ScriptedEngine):
        async def resume(self):
            await super().resume()
            await pool.pause()

    pool = EnginePool([Returning(lambda _prompt: range(100)), *engines(1)], check_every_s=60)
    await pool.start()
    pool._take_out(pool._members[0], EngineError("gone"))
    await pool._check_all()
    assert pool._members[0].fault is not None
    await pool.stop()


async def test_a_server_that_was_restarted_in_a_pause_does_not_return_with_other_weights():
    class Restarted(ScriptedEngine):
        """Paused, it cannot be told from one that loads new weights."""

        async def health(self):
            return replace(await super().health(), ok=self._paused)

    members = [Restarted(lambda _prompt: range(100)), *engines(1)]
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    await pool.pause()
    pool._take_out(pool._members[0], EngineError("it did not go on"))
    await pool.resume()
    await pool._check_all()
    await asyncio.gather(*(pool.generate([n], ONE) for n in range(8)))
    assert members[0].log == []
    await pool.stop()


async def test_with_no_server_left_requests_fail_with_the_reasons():
    members = engines(1)
    pool = EnginePool(members)
    await pool.start()
    members[0].crash("killed")
    with pytest.raises(EngineError, match=r"no server of the pool is left.*killed"):
        await pool.generate([1], ONE)
    await pool.stop()


async def test_a_bad_request_is_the_callers_and_takes_nobody_out():
    pool = EnginePool(engines(2, max_length=2))
    await pool.start()
    with pytest.raises(EngineError, match="leaves no room"):
        await pool.generate([1, 2, 3], ONE)
    assert (await pool.health()).ok
    await pool.stop()


async def test_an_update_reaches_every_server():
    members = engines(3)
    pool = EnginePool(members)
    await pool.start()
    await pool.pause()
    await pool.update_weights(4, iter([("w", None)]))
    await pool.resume()
    assert [member.updates for member in members] == [[(4, ["w"])]] * 3
    assert pool.version == 4
    await pool.stop()


async def test_servers_of_different_weights_become_equal_with_the_first_update():
    members = engines(2)
    members[1].version = 3
    pool = EnginePool(members)
    await pool.start()
    assert pool.version == 0
    await pool.update_weights(4, [("w", None)])
    assert [member.version for member in members] == [4, 4]
    await pool.stop()


async def test_a_server_that_lost_its_weights_in_a_restart_comes_back_with_the_next_ones(caplog):
    class Restarted(ScriptedEngine):
        async def health(self):
            state = await super().health()
            return replace(state, ok=self.version == 2, detail="was it restarted?")

    members = [Restarted(lambda _prompt: range(100)), *engines(1)]
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    pool._take_out(pool._members[0], EngineError("gone"))
    staged = await pool.stage_weights(2, [("w", None)])
    await asyncio.gather(*(pool.generate([n], ONE) for n in range(8)))
    assert members[0].log == [], "it holds who knows what until it has them"
    await pool.pause()
    assert "is back" not in caplog.text
    await pool.update_weights(2, staged)
    assert caplog.messages[-1] == "server 0 of the pool is back"
    await pool.resume()
    assert [member.version for member in members] == [2, 2]
    await asyncio.gather(*(pool.generate([n], ONE) for n in range(8, 16)))
    assert {
        version for member in members for call in member.log[-1:] for version in call.completion.policy_versions
    } == {2}
    assert members[0].log
    await pool.stop()


async def test_a_server_that_answers_but_fails_the_update_stays_out():
    class Broken(ScriptedEngine):
        async def update_weights(self, version, source):
            raise EngineError("the disk is full")

    members = [Broken(lambda _prompt: range(100)), *engines(1)]
    pool = EnginePool(members, check_every_s=60)
    await pool.start()
    pool._take_out(pool._members[0], EngineError("gone"))
    await pool.update_weights(2, [("w", None)])
    assert "the disk is full" in (await pool.health()).detail
    await pool.generate([1], ONE)
    assert members[0].log == []
    await pool.stop()
