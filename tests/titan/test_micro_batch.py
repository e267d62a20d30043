import pytest
import torch

from meshy.titan.micro_batch import Sample, pack, pad


def sample(tokens: list[int], mask: list[int]) -> Sample:
    values = torch.tensor(tokens, dtype=torch.float32) / 10
    return Sample(torch.tensor(tokens), torch.tensor(mask, dtype=torch.bool), {"values": values})


SAMPLES = [sample([5, 6, 7], [0, 1, 1]), sample([8, 9], [0, 0]), sample([1, 2, 3, 4], [0, 0, 1, 1])]


@pytest.mark.parametrize("layout", [pad, pack])
def test_each_written_token_is_predicted_by_the_position_before_it(layout):
    batch = layout(SAMPLES, ["values"], 1)
    assert batch.targets.tolist() == [6, 7, 3, 4]
    assert batch.tokens.flatten()[batch.select].tolist() == [5, 6, 2, 3]
    assert batch.sequence.tolist() == [0, 0, 2, 2]
    torch.testing.assert_close(batch.columns["values"], torch.tensor([0.6, 0.7, 0.3, 0.4]))


def test_padded_rows_are_as_wide_as_the_longest():
    assert pad(SAMPLES).tokens.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]]
    assert pad(SAMPLES, multiple=8).tokens.shape == (3, 8)


def test_a_packed_row_counts_positions_anew_in_each_document_and_pads_with_one_of_its_own():
    batch = pack(SAMPLES, multiple=4)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 0]]
    assert batch.documents == (3, 2, 4, 3)
    assert pack(SAMPLES).documents == (3, 2, 4)


@pytest.mark.parametrize("layout", [pad, pack])
def test_no_sample_gives_a_batch_that_can_still_be_run(layout):
    batch = layout([], ["values"])
    assert batch.tokens.numel() >= 1 and batch.select.shape == batch.targets.shape == (0,)
    assert batch.columns["values"].shape == (0,)
