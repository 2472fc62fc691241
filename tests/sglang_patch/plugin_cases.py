"""The plugin against the installed SGLang. `test_plugin_targets.py` runs this in one process of
its own: importing the engine takes long, and hooks, once applied, stay.

In file order: refusals while nothing is registered, then registration, then the hooked engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt import server_args as sglang_server_args
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_patch import plugin, state
from sglang_patch.contracts import _requirements, policy_for
from sglang_patch.hooks.args import FIELDS
from sglang_patch.hooks.scheduler import DIGEST_RPC

V1 = "qwen3_dense_true_on_policy_v1"
V2 = "qwen3_dense_true_on_policy_v2"
HOOKS = plugin.hooks()


@pytest.fixture(autouse=True)
def _no_live_policy() -> Iterator[None]:
    state.activate(None)
    yield
    state.activate(None)


def test_hooks_have_their_own_names_and_targets() -> None:
    assert len(HOOKS) >= 20
    assert len({hook.name for hook in HOOKS}) == len(HOOKS)
    assert len({hook.target for hook in HOOKS}) == len(HOOKS)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_target_is_there_and_is_the_text_it_was_written_against(hook: Any) -> None:
    row = plugin._check(hook)
    assert (row.target, row.found, row.unchanged) == (hook.target, True, True), row.detail
    assert row.detail == hook.digest


def test_check_targets_changes_nothing() -> None:
    rows = plugin.check_targets()
    assert [row.target for row in rows] == [hook.target for hook in HOOKS]
    assert untouched()


def untouched() -> bool:
    """Nothing registered, no field added, no method added."""
    fields = sglang_server_args.ServerArgs.__dataclass_fields__
    return not HookRegistry._hooks and not set(FIELDS) & set(fields) and not has_rpc()


def has_rpc() -> bool:
    return hasattr(Scheduler, DIGEST_RPC)


MOVED = [
    ({"digest": "0" * 16}, "source digest .* written against 0000000000000000"),
    ({"target": "sglang.srt.nowhere.Thing.call", "checked": None}, "no attribute 'nowhere'"),
    ({"target": "sglang.srt.layers.sampler.Sampler.gone", "checked": None}, "AttributeError"),
    ({"target": "sglang.srt.layers.sampler.logger", "checked": None}, "TypeError"),
]


@pytest.mark.parametrize(("change", "reason"), MOVED)
def test_one_moved_target_is_named_and_nothing_is_registered(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a contract is worse than none: the other hooks are not installed either."""
    moved = dataclasses.replace(HOOKS[-1], **change)
    monkeypatch.setattr(plugin, "hooks", lambda: (*HOOKS[:-1], moved))
    with pytest.raises(RuntimeError, match=f"true on-policy hooks refused: .*{reason}") as caught:
        plugin.register()
    assert moved.target in str(caught.value)
    assert HOOKS[0].target not in str(caught.value)
    assert untouched()


def test_all_moved_targets_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = [dataclasses.replace(hook, digest="0" * 16) for hook in HOOKS]
    monkeypatch.setattr(plugin, "hooks", lambda: tuple(moved))
    with pytest.raises(RuntimeError, match="hooks refused") as caught:
        plugin.main()
    for hook in HOOKS:
        line = f"{hook.target}: source digest {hook.digest}, written against {'0' * 16}"
        assert line in str(caught.value)
    assert untouched()


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        return "9.9.9" if name == "sglang" else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(RuntimeError, match="sglang 9.9.9 is installed.*written for 0.5.17"):
        plugin.register()
    assert untouched()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_without_a_policy_the_original_runs(hook: Any) -> None:
    """`always` hooks are what must work before a policy exists; all others leave SGLang stock."""
    seen: list[Any] = []

    def replacement(original: Any, *args: Any, **kwargs: Any) -> str:
        seen.append((original, args, kwargs))
        return "replaced"

    call = dataclasses.replace(hook, replacement=replacement).wrapper()

    def original(*args: Any, **kwargs: Any) -> Any:
        return "original", args, kwargs

    result = call(original, 1, two=2)
    if hook.always:
        assert result == "replaced"
        assert seen == [(original, (1,), {"two": 2})]
    else:
        assert result == ("original", (1,), {"two": 2})
        assert seen == []


def test_only_arguments_scheduler_and_cpu_hooks_act_without_a_policy() -> None:
    always = {hook.name for hook in HOOKS if hook.always}
    assert always == {"server_args", "scheduler", "cpu_group", "murmur_hash32"}
    assert {hook.name for hook in HOOKS if hook.cpu_only} == {"cpu_group", "murmur_hash32"}


def test_with_a_policy_the_replacement_runs_and_is_counted() -> None:
    state.activate(policy_for(argparse.Namespace(**PERMITTED)))
    hooks = [dataclasses.replace(hook, replacement=lambda original, x: x + 1) for hook in HOOKS[:2]]
    assert [hooks[0].wrapper()(None, 1), hooks[0].wrapper()(None, 2)] == [2, 3]
    assert hooks[1].wrapper()(None, 3) == 4
    assert state.require().calls == {hooks[0].name: 2, hooks[1].name: 1}


def test_a_second_policy_in_one_process_is_refused() -> None:
    first = policy_for(argparse.Namespace(**PERMITTED))
    state.activate(first)
    state.activate(first)
    other = policy_for(argparse.Namespace(**{**PERMITTED, "true_on_policy_contract": V1}))
    with pytest.raises(ValueError, match=f"already serves {V2}; .* for {V1}"):
        state.activate(other)
    assert state.require().policy == first


PERMITTED: dict[str, Any] = {
    "true_on_policy_contract": f"{V2}:segments=8",
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "enable_deterministic_inference": True,
}


def test_a_gpu_engine_gets_every_hook_but_the_cpu_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM")
    plugin.register()
    assert set(HookRegistry._hooks) == {hook.target for hook in HOOKS if not hook.cpu_only}
    HookRegistry.reset()


def test_registration_and_application() -> None:
    assert os.environ["SGLANG_PLATFORM"] == "true_on_policy_cpu"
    plugin.register()
    assert set(HookRegistry._hooks) == {hook.target for hook in HOOKS}
    kinds = [kind for entries in HookRegistry._hooks.values() for kind, _, _ in entries]
    assert kinds == [HookType.AROUND] * len(HOOKS)
    # SGLang logs a hook that it could not apply, and goes on: look at what was applied.
    HookRegistry.apply_hooks()
    assert {hook.target for hook in HOOKS} == HookRegistry._patched
    assert has_rpc()


def test_targets_still_check_out_behind_our_own_wrappers() -> None:
    assert all(row.found and row.unchanged for row in plugin.check_targets())


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config is all that the engine's arguments look at."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 259,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def command_line(model_path: Path, *extra: str) -> list[str]:
    flags = "--device cpu --dtype bfloat16 --attention-backend torch_native --skip-tokenizer-init"
    return [
        "--model-path",
        str(model_path),
        *flags.split(),
        "--enable-deterministic-inference",
        *extra,
    ]


def test_the_flag_reaches_the_policy(model_path: Path) -> None:
    """SGLang's own parser, `from_cli_args` and argument resolution, as an engine starts."""
    name = f"{V2}:segments=4"
    args = sglang_server_args.prepare_server_args(
        command_line(model_path, "--true-on-policy-contract", name)
    )
    assert args.true_on_policy_contract == name
    assert args.true_on_policy_fault is None
    assert dataclasses.asdict(args)["true_on_policy_contract"] == name
    policy = policy_for(args)
    assert policy is not None
    assert (policy.contract.name, policy.segments, policy.tensor_parallel_size) == (V2, 4, 1)


def test_fields_are_keywords_and_default_to_stock(model_path: Path) -> None:
    def server_args(**extra: Any) -> Any:
        return sglang_server_args.ServerArgs(
            model_path=str(model_path), device="cpu", skip_tokenizer_init=True, **extra
        )

    assert policy_for(server_args()) is None
    fault = server_args(true_on_policy_fault="1:down_proj", true_on_policy_contract=V1)
    assert (fault.true_on_policy_contract, fault.true_on_policy_fault) == (V1, "1:down_proj")
    with pytest.raises(TypeError, match="true_on_policy_contrct"):
        server_args(true_on_policy_contrct=V1)


def test_the_flag_is_described_where_sglang_lists_its_flags() -> None:
    parser = argparse.ArgumentParser()
    sglang_server_args.ServerArgs.add_cli_args(parser)
    (action,) = [a for a in parser._actions if "--true-on-policy-contract" in a.option_strings]
    assert action.default is None
    assert V1 in str(action.help)
    assert V2 in str(action.help)


def test_every_setting_that_a_contract_looks_at_is_one_that_sglang_has() -> None:
    """A setting renamed upstream would read as None, and None permits most of them."""
    fields = {field.name for field in dataclasses.fields(sglang_server_args.ServerArgs)}
    looked_at = {setting for setting, *_ in _requirements(argparse.Namespace())}
    assert len(looked_at) >= 14
    assert looked_at | {"tp_size"} <= fields


def test_fields_are_added_once() -> None:
    names = [field.name for field in dataclasses.fields(sglang_server_args.ServerArgs)]
    assert [names.count(name) for name in FIELDS] == [1, 1]
    plugin._extend_engine()
    again = [field.name for field in dataclasses.fields(sglang_server_args.ServerArgs)]
    assert again == names
