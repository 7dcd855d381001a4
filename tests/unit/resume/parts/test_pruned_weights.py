"""ModelPruning: weights that it shares with the model are shared again."""

import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune
from untrained import in_epoch_5, run_of

from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.pruned_weights import SharedPrunedWeights


def test_weights_that_a_pruning_shares_are_shared_again():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for layer in layers:
        prune.identity(layer, "weight")
    callback = ModelPruning(
        "l1_unstructured", parameters_to_prune=[(each, "weight") for each in layers]
    )
    callback._parameters_to_prune = [(each, "weight") for each in layers]
    copies = [nn.Linear(2, 2), nn.Linear(2, 2)]
    copies[1].weight = nn.Parameter(layers[1].weight_orig.data)
    callback._original_layers = {
        number: {"data": copied, "names": [(number, "weight")]}
        for number, copied in enumerate(copies)
    }
    part = run_of(in_epoch_5(callbacks=[Callback(), callback])).part(SharedPrunedWeights)
    assert part.save(None, None) == [(1, 1)]
    copies[1].weight = nn.Parameter(torch.zeros(2, 2))
    part.restore([(1, 1)], Moment.TRAINING)
    assert part.save(None, None) == [(1, 1)]
