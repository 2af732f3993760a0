"""Which names are published."""

import pytest

from clip_moe.engine.local_names import is_hub_name, without_paths


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "my data" / "cats, dogs").mkdir(parents=True)


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("/home/me/secret/clip", "clip"),
        ("~/secret/clip", "clip"),
        ("../secret/clip/", "clip"),
        ("C:\\Users\\me\\clip", "clip"),
        ("file:///home/me/clip", "clip"),
        ("runs/demo", "demo"),
        ("runs/gone/clip_up", "clip_up"),
        ("secret/*.parquet", "*.parquet"),
        ("my data/cats, dogs", "cats, dogs"),
        ("../..", "a local folder"),
        ("100 rows of /home/me/secret/cats, split test", "100 rows of cats, split test"),
        ("100 rows of HERE/my data/cats, dogs, split test", "100 rows of cats, dogs, split test"),
        ("zero-shot, runs/demo", "zero-shot, demo"),
        # What stays
        ("openai/clip-vit-base-patch32", None),
        ("symbols", None),
        ("hf://datasets/user/name/train-*.parquet", None),
        ("a photo of red/green {}.", None),
        ("all images / s, 3/4 of them; R@1 image→text", None),
        (r"vision_model\..*(experts|router)", None),
    ],
)
def test_of_a_path_the_last_part_is_published(tmp_path, text, published):
    text = text.replace("HERE", str(tmp_path))
    assert without_paths({"key": [text, 3]}) == {"key": [text if published is None else published, 3]}


def test_hub_names(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    names = ["openai/clip", "symbol_clip", "runs/demo", "runs", "runs/gone/clip", "/home/me", "no name", "a--b", ""]
    assert list(filter(is_hub_name, [*names, "loop"])) == names[:2]
