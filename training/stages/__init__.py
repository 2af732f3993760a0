"""The kinds of stages that a recipe knows by name. A new one is a class, and a line here."""

from training.stages.data_experts import (
    AssembleStage,
    AssignStage,
    ClusterCoarseStage,
    ClusterFineStage,
    EmbedCaptionsStage,
    SelectStage,
)
from training.stages.evaluate import AnalyzeStage, EvaluateStage
from training.stages.features import CaptionsStage, ClusterStage, EmbedStage, HiddenStatesStage
from training.stages.models import (
    AverageStage,
    InitializeStage,
    LongContextStage,
    TokenizerStage,
    UnifyStage,
    UpcycleStage,
)
from training.stages.train import TrainDataExpertStage, TrainExpertsStage, TrainRouterStage, TrainStage

AnyStage = (
    TokenizerStage
    | InitializeStage
    | LongContextStage
    | UpcycleStage
    | CaptionsStage
    | EmbedStage
    | HiddenStatesStage
    | ClusterStage
    | EmbedCaptionsStage
    | ClusterFineStage
    | AssignStage
    | ClusterCoarseStage
    | SelectStage
    | TrainStage
    | TrainExpertsStage
    | TrainDataExpertStage
    | AssembleStage
    | AverageStage
    | UnifyStage
    | TrainRouterStage
    | EvaluateStage
    | AnalyzeStage
)
