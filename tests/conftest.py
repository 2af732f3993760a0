"""Set before torch and huggingface_hub are imported, here and in the processes that tests start."""

import copy
import functools
import gc
import os

import pytest
from local_hub import TOKEN, LocalHub

# No test may reach for the network: a hub name that is not cached fails at once. The fixture `hub` is the Hub.
HUB = LocalHub()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": HUB.address, "HF_HUB_DISABLE_XET": "1"}
# One thread: tiny models are faster with it, and processes that are compared to the bit round alike.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config):
    """Bits repeat on a CPU alone, so a GPU is for the tests that are marked with it."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish():
    """Garbage collection need not look through modules that are imported by now."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def datasets_of_this_session(tmp_path_factory):
    """Nothing that earlier sessions cached is read, and nothing is left in the user's cache."""
    import datasets

    cache = tmp_path_factory.mktemp("datasets_cache")
    os.environ["HF_DATASETS_CACHE"] = str(cache)
    datasets.config.HF_DATASETS_CACHE = cache
    # `datasets` waits 5 seconds whenever a stream of several parquet files ends
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


def go_online(monkeypatch, online=True):
    """The libraries read this when they are imported, and a process that a test starts does so then."""
    import datasets
    import huggingface_hub

    from clip_moe.engine import hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "0" if online else "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", not online)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", not online)
    hub._commits.clear()  # as in a new process
    hub._remember.cache_clear()


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """The Hub, without repositories, and an empty cache. Its `online(False)` is HF_HUB_OFFLINE=1 in a new process."""
    import datasets
    import huggingface_hub

    cache = tmp_path_factory.mktemp("hub_cache")
    # Rows of the same commit that an earlier test prepared would not be downloaded again
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hub_datasets"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(datasets.config.HF_DATASETS_CACHE))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    HUB.clear()
    HUB.online = functools.partial(go_online, monkeypatch)
    HUB.online()
    HUB.thread.is_alive()
    yield HUB
    HUB.online(False)
    HUB.clear()


@pytest.fixture(autouse=True, scope="session")
def tokenizers_of_this_session():
    """A world's tokenizer is learned once a process: that is half of what it takes to make a tiny model."""
    from clip_moe.data.world import World

    learn, learned = World.build_tokenizer, {}

    def build_tokenizer(world, length):
        key = world.texts, world.vocabulary, length
        if key not in learned:
            learned[key] = learn(world, length)
        return copy.deepcopy(learned[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "build_tokenizer", build_tokenizer)
        yield


@pytest.fixture
def login(monkeypatch):
    """The token of the Hub's user `user`."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def unverified(monkeypatch):
    """What is published is not tried in a process of its own, which takes seconds."""
    monkeypatch.setattr("clip_moe.conversion.publishing.bundle.verify", lambda folder: None)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The folder of a dense and an upcycled CLIP of a few thousand parameters, only to be read."""
    from tiny_runs import DENSE, SPARSE, run_stages

    return run_stages(tmp_path_factory.mktemp("models"), [DENSE, SPARSE])


@pytest.fixture(scope="session")
def dense(models):
    return models / "dense"


@pytest.fixture(scope="session")
def sparse(models):
    return models / "sparse"


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """`tiny_runs.train` with some settings, once a session: what it wrote is only to be read."""
    from tiny_runs import train

    done = {}

    def whole(**settings):
        key = str(settings)
        if key not in done:
            done[key] = train(tmp_path_factory.mktemp("whole"), **settings)
        return done[key]

    return whole


@pytest.fixture(scope="session")
def processor():
    """The symbols' processor, for texts of 16 tokens and images of 16 pixels."""
    from tiny_clip import symbol_processor

    return symbol_processor(16, 16)


@pytest.fixture(scope="session")
def tokenizer():
    """The symbols' tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("training/symbol_clip")


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn within a test, which are closed at its end."""
    from clip_moe.evaluation.figures import plt

    drawn, close = [], plt.close
    monkeypatch.setattr(plt, "close", drawn.append)
    yield drawn
    for figure in drawn:
        close(figure)


@pytest.fixture
def run(tmp_path):
    """`tiny_runs.run_stages` in the test's own folder."""
    from tiny_runs import run_stages

    return functools.partial(run_stages, tmp_path)


@pytest.fixture(autouse=True)
def seed():
    """A test draws the same numbers whatever ran before it (pytest-randomly does so for random and numpy)."""
    import torch

    torch.manual_seed(0)
