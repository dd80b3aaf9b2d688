"""A configuration is right as a whole, or an error names the key, the place and the nearest valid key."""

import re

import pytest

from sparring.config_file import load_config
from sparring.errors import ConfigError

BASE = "model: smollm2\nenv:\n  id: sparring/Calculator-v0\n"


@pytest.fixture
def write(tmp_path):
    def _write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return _write


def test_defaults_fill_what_the_file_leaves_out(write):
    loaded = load_config(write(BASE))
    assert loaded.config.model.path == "smollm2"
    assert loaded.config.rollout.staleness == 2
    assert loaded.run_dir.as_posix() == "runs/run"


def test_an_override_beats_the_file_and_says_so(write):
    text = BASE + "trainer: {learning_rate: 1e-6}\n"
    loaded = load_config(write(text), ["trainer.learning_rate=2e-5", "objective=dapo"])
    assert loaded.config.trainer.learning_rate == 2e-5
    assert loaded.config.objective.name == "dapo"
    origins = {key: origin for key, _, origin in loaded.lines()}
    assert origins["trainer.learning_rate"] == "override trainer.learning_rate=2e-5"
    assert origins["env.id"].endswith("run.yaml:3")
    assert origins["trainer.steps"] == "default"


def assert_loads_again(loaded, file):
    file.write_text(loaded.to_yaml())
    reread = load_config(file)
    assert reread.run_dir == loaded.run_dir
    assert reread.config == loaded.config.model_copy(update={"run_dir": str(loaded.run_dir)})


def test_the_resolved_file_loads_to_the_same_configuration(write, tmp_path):
    loaded = load_config(write(BASE), ["env.kwargs.level=2", "trainer.adam_betas=[0.9, 0.95]"])
    assert_loads_again(loaded, tmp_path / "again.yaml")


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (BASE, ["trainer.learing_rate=1"], "did you mean trainer.learning_rate"),
        (BASE + "trainr: {steps: 3}\n", [], "run.yaml:4: unknown key trainr; did you mean trainer"),
        (BASE, ["learning_rate=1"], "did you mean trainer.learning_rate"),
        (BASE + "trainer:\n  steps: many\n", [], "run.yaml:5: trainer.steps"),
        (BASE + "trainer: {steps: '3'}\n", [], "trainer.steps"),
        (BASE + "trainer: {steps: 0}\n", [], "greater than or equal to 1"),
        (BASE + "seed: 1\nseed: 2\n", [], "run.yaml:5: the key seed is given twice"),
        (BASE, ["engine.deterministic=true"], "run.yaml: engine.deterministic repeats a synchronous run alone"),
        (BASE, ["engine.release_memory=true"], "SGLang's, not that of engine.type=torch"),
        (BASE, ["engine.type=sglang", "engine.release_memory=true"], "eval.during_training=stall"),
        (BASE, ["engine.type=sglang", "engine.lora=adapter"], "set trainer.lora"),
        (BASE, ["sampling.max_new_tokens=4096"], "leaves no room"),
        (BASE, ["rollout.buffer_groups=2"], "can never hold"),
        (BASE, ["rollout.group_size=1"], "greater than or equal to 2"),
        (BASE, ["steps"], "key.subkey=value"),
        (BASE, ["seed.x=1", ], "inside seed"),
        ("env: {id: x}\n", [], "run.yaml: the key model is missing"),
        ("", [], "is empty"),
        ("- a\n", [], "must be a mapping"),
        ("a: [\n", [], "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(write, text, overrides, expected):
    if overrides == ["seed.x=1"]:
        text += "seed: 1\n"
    with pytest.raises(ConfigError, match=None) as error:
        load_config(write(text), overrides)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.lr", "trainer.learning_rate"),
        ("warm_start.lr", "warm_start.learning_rate"),
        ("lr", "trainer.learning_rate"),
        ("trainer.batch_size", "rollout.groups_per_step"),
        ("trainer.bs", "rollout.groups_per_step"),
        ("warm_start.bs", "warm_start.batch_size"),
        ("rollout.num_generations", "rollout.group_size"),
        ("trainer.epochs", "trainer.steps"),
        ("trainer.max_steps", "trainer.steps"),
        ("sampling.temp", "sampling.temperature"),
        ("sampling.max_tokens", "sampling.max_new_tokens"),
        ("model.name", "model.path"),
        ("env.name", "env.id"),
        ("rollout.temperature", "sampling.temperature"),
    ],
)
def test_a_knob_by_another_trainers_name_is_answered_with_ours(write, key, meant):
    with pytest.raises(ConfigError, match=rf"unknown key {re.escape(key)}; did you mean {re.escape(meant)}\?"):
        load_config(write(BASE), [f"{key}=1"])


def test_an_empty_section_means_the_defaults(write):
    path = write("model: {path: smollm2}\nenv: sparring/Calculator-v0\nwarm_start: {steps: 5}\neval:\n")
    assert load_config(path).config.eval.tasks == 64
    assert load_config(path, ["warm_start=null"]).config.warm_start.steps == 0


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "picture.yaml").write_bytes(b"\xff\xd8")
    with pytest.raises(ConfigError, match=r"picture\.yaml: it is no text in UTF-8"):
        load_config(tmp_path / "picture.yaml")


def test_a_mixture_stands_in_place_of_one_environment(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\nenv:\n  mixture:\n"
        "  - {id: sparring/KeyLookup-v0, weight: 3}\n  - {id: sparring/KeyLookup-v0, kwargs: {length: 2}}\n"
    )
    loaded = load_config(path)
    assert [(part.label, part.weight) for part in loaded.config.env.parts] == [
        ("sparring/KeyLookup-v0", 3.0),
        ("sparring/KeyLookup-v0(length=2)", 1.0),
    ]
    assert_loads_again(loaded, tmp_path / "again.yaml")
    assert any(key == "env.mixture" and "KeyLookup" in value for key, value, _ in loaded.lines())


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("{kwargs: {x: 1}}", r"env\.id is missing"),
        ("{id: a/B-v0, mixture: [{id: a/B-v0}]}", "exclude each other"),
        ("{mixture: [{id: a/B-v0}, {id: a/B-v0}]}", "twice with the same kwargs"),
        ("{mixture: [{id: a/B-v0, weight: 0}]}", r"env\.mixture\.0\.weight"),
        ("{mixture: [{id: a/B-v0, wieght: 1}]}", r"env\.mixture\.0\.wieght"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(tmp_path, env, message):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: m\nenv: {env}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path)
