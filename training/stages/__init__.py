"""The kinds of stages that a recipe knows by name. A new one is a class in one of the files, and a line here."""

from typing import get_args

from training.stages import (
    assemble,
    data_experts,
    evaluate,
    features,
    long_clip,
    mixture,
    models,
    train,
    train_data_expert,
)
from training.stages.base import Stage

AnyStage = (
    models.TokenizerStage
    | models.InitializeStage
    | models.LongContextStage
    | models.UpcycleStage
    | mixture.MixtureStage
    | features.CaptionsStage
    | features.EmbedStage
    | features.ClusterStage
    | data_experts.EmbedCaptionsStage
    | data_experts.ClusterFineStage
    | data_experts.ClusterCoarseStage
    | data_experts.SelectStage
    | train.TrainStage
    | long_clip.TrainLongCLIPStage
    | train.TrainExpertsStage
    | train_data_expert.TrainDataExpertStage
    | assemble.AssembleStage
    | models.AverageStage
    | models.DenseStage
    | models.UnifyStage
    | train.TrainRouterStage
    | evaluate.EvaluateStage
    | evaluate.AnalyzeStage
)

STAGES: dict[str, type[Stage]] = {stage.kind: stage for stage in get_args(AnyStage)}
