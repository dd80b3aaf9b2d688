"""A small GSM8K of our own, so that the environment is tested without its data set."""

import json

import pytest

PROBLEMS = {
    "train": [
        ("Ann has 2 eggs and buys 3. How many?", "2 + 3 = <<2+3=5>>5\n#### 5"),
        ("Twice 600?", "It is\n#### 1,200"),
    ],
    "test": [("Half of 9?", "9 / 2\n#### 4.5")],
}


def write_gsm8k(folder, problems=None):
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (problems or PROBLEMS).items():
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def gsm8k_folder(tmp_path):
    return write_gsm8k(tmp_path / "gsm8k")


@pytest.fixture
def sparring_data_env(gsm8k_folder, monkeypatch):
    monkeypatch.setenv("SPARRING_DATA", str(gsm8k_folder.parent))
