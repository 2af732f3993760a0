"""Linear probe: a linear classifier on frozen image features (CLIP, section 3.2; MoDE, section 5.4)."""

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from clip_moe.evaluation.zero_shot import class_metrics

# Inverse strengths of the L2 penalty, of which the best is chosen
INVERSE_PENALTIES = tuple(10.0**power for power in range(-1, 5))
# With more numbers in the training features, scikit-learn's solver takes too long
MOST_NUMBERS_FOR_SCIKIT = 2**28
# The probe that is trained in batches has OpenCLIP's optimizer and schedule
BATCH_SIZE, EPOCHS, LEARNING_RATE = 1024, 20, 1e-2


def linear_probe_metrics(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    features: np.ndarray,
    labels: np.ndarray,
    device: str | torch.device = "cpu",
) -> dict[str, float]:
    """`clip_moe.evaluation.zero_shot.class_metrics` of a linear classifier.

    scikit-learn's logistic regression, whose penalty is chosen on a fifth of the training set that is held out, then
    fitted to all of it; or where the features are too large for that, one trained with AdamW in batches.

    Args:
        train_features, train_labels: (train images, D), and (train images,) integers.
        features, labels: those of the test images.
        device: where torch computes.

    Raises:
        ValueError: a test label does not occur in training.
    """
    train_labels, labels = np.asarray(train_labels), np.asarray(labels)
    unknown = sorted(set(labels.tolist()) - set(train_labels.tolist()))
    if unknown:
        raise ValueError(f"the training set has no image of the classes {unknown[:5]}")
    if train_features.size > MOST_NUMBERS_FOR_SCIKIT:
        predicted = _predict_torch(train_features, train_labels, features, torch.device(device))
    else:
        predicted = _predict_scikit(train_features, train_labels, features)
    return class_metrics(labels, predicted)


def _predict_scikit(train_features, train_labels, features) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedShuffleSplit

    share = max(0.2, len(set(train_labels.tolist())) / len(train_labels))
    held_out = StratifiedShuffleSplit(1, test_size=share, random_state=0)
    penalties = {"C": INVERSE_PENALTIES}
    search = GridSearchCV(LogisticRegression(max_iter=1000), penalties, cv=held_out, error_score="raise")
    with threadpool_limits(1):  # repeatable to the bit
        return search.fit(train_features, train_labels).predict(features)


def _predict_torch(train_features, train_labels, features, device: torch.device) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    classes, targets = np.unique(train_labels, return_inverse=True)
    inputs, targets = torch.as_tensor(train_features, dtype=torch.float32), torch.as_tensor(targets)
    probe = torch.nn.Linear(inputs.shape[1], len(classes), device=device)
    torch.nn.init.zeros_(probe.weight)
    torch.nn.init.zeros_(probe.bias)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = EPOCHS * -(-len(inputs) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(inputs), generator=generator).split(BATCH_SIZE):
            loss = torch.nn.functional.cross_entropy(probe(inputs[batch].to(device)), targets[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        chunks = torch.as_tensor(features, dtype=torch.float32).split(BATCH_SIZE)
        predicted = torch.cat([probe(chunk.to(device)).argmax(dim=1).cpu() for chunk in chunks])
    return classes[predicted.numpy()]
