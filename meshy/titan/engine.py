"""One model under FSDP2, with its optimiser or frozen: forward, backward, step, load, export. Knows no loss and no
queue."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.tools import utils as titan_utils

from meshy.device import device_kind
from meshy.titan.attention import Documents
from meshy.titan.cpu import reduce_by_plain_sum
from meshy.titan.micro_batch import MicroBatch, Sample, pack, pad
from meshy.titan.model_spec import model_spec
from meshy.titan.parked import Parking
from meshy.titan.policy_model import LEAST_ROWS, Reduce
from meshy.trainable import VALUE


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """An optimiser's settings; its learning rate is given step by step. max_grad_norm: gradients are clipped to it."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine is built from.

    model: a local folder in Hugging Face format. max_seq_len: longest row in tokens. packed: batches are packed rows
    (documents one after another) instead of padded ones. optimizer: None for a model that stays as it is.
    value_head: the model gives one number a token instead of logits.
    dtype: of the stored parameters and the optimiser's state.
    mixed_precision: dtype of the parameters while they compute. activation_checkpointing: none, selective or full.
    spmd_backend: TorchTitan's; torch 2.13 takes "partial_dtensor" only.
    """

    model: Path
    max_seq_len: int
    packed: bool = False
    optimizer: AdamW | None = AdamW()
    value_head: bool = False
    dtype: str = "float32"
    mixed_precision: str = "float32"
    activation_checkpointing: str = "none"
    spmd_backend: str = "partial_dtensor"
    compile: bool = False
    deterministic: bool = False
    seed: int = 0


class TitanEngine:
    """Needs an initialised default process group; every method that computes is collective over it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.on_cpu = device_kind() == "cpu"
        self.device = titan_utils.get_local_device()
        titan_utils.device_module.set_device(self.device)
        torch.autograd.set_multithreading_enabled(False)  # the spmd_types backend keeps its mesh in thread-local state
        parallelism = ParallelismConfig(spmd_backend=config.spmd_backend)
        self.parallel_dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dist_utils.set_spmd_backend(config.spmd_backend)
        self._context = dist_utils.get_spmd_context(parallel_dims=self.parallel_dims, spmd_typechecking=False)
        debug = DebugConfig(seed=config.seed, deterministic=config.deterministic, enable_structured_logging=False)
        dist_utils.set_determinism(self.parallel_dims, self.device, debug, distinct_seed_mesh_dims=["pp"])

        self.flex = config.packed and not self.on_cpu
        # Compiled attention is compiled again for every new shape; on a CPU any width will do.
        self.row_multiple = 1 if self.on_cpu else 128
        spec = model_spec(config.model, max_seq_len=config.max_seq_len, flex=self.flex, value_head=config.value_head)
        if config.spmd_backend != "partial_dtensor":
            set_qwen3_sharding_config(spec.model, enable_sp=parallelism.enable_sequence_parallel, enable_ep=False)
        self.adapter = spec.state_dict_adapter(spec.model, str(config.model))
        self.model: Any = self._build_model(spec, parallelism)
        self.optimizers = self._build_optimizer()
        self._parking = Parking(self.model, self.optimizers or (), self.device)

    def _build_model(self, spec, parallelism: ParallelismConfig) -> nn.Module:
        config = self.config
        with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[config.dtype]):
            model = spec.model.build()
        model.verify_module_protocol()
        checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
        model = spec.parallelize_fn(
            model,
            parallel_dims=self.parallel_dims,
            training=TrainingConfig(
                dtype=config.dtype,
                mixed_precision_param=config.mixed_precision,
                seq_len=config.max_seq_len,
                disable_cuda_graphs=True,
            ),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=config.compile, components=["model"]),
            ac_config=checkpointing[config.activation_checkpointing],
            dump_folder="",
        )
        reduce_by_plain_sum(model)
        model.to_empty(device=self.device.type)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        self._load(model)
        return model.requires_grad_(config.optimizer is not None).train(config.optimizer is not None)

    def _build_optimizer(self) -> OptimizersContainer | None:
        settings = self.config.optimizer
        if settings is None:
            return None
        adamw = default_adamw(lr=0.0, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        return adamw.build(model_parts=[self.model])

    def _load(self, model: nn.Module) -> None:
        """Each rank reads its own shards of the folder's safetensors, cast to the parameters' dtype."""
        hf = self.adapter.to_hf(model.state_dict())
        reader = self.adapter.get_hf_storage_reader(str(self.config.model))
        if VALUE in hf and VALUE not in reader.read_metadata().state_dict_metadata:
            initial = hf.pop(VALUE)
            dcp.load(hf, storage_reader=reader)
            hf[VALUE] = initial
        else:
            dcp.load(hf, storage_reader=reader)
        model.load_state_dict(self.adapter.from_hf(hf), strict=True)

    # Computing --------------------------------------------------------------------------------------------------------

    def batch(self, samples: Sequence[Sample], names: Sequence[str] = (), multiple: int = LEAST_ROWS) -> MicroBatch:
        """A micro-batch in this engine's layout, on its device. names: columns that it carries. multiple: of which its
        rows are long, at least."""
        layout = pack if self.config.packed else pad
        return layout(samples, names, max(self.row_multiple, multiple)).to(self.device)

    def logits(self, batch: MicroBatch) -> Float[Tensor, "selected vocab"]:
        """Logits that predict the batch's response tokens; with a graph unless under no_grad."""
        with self._context():
            return self.model(batch.tokens, batch.positions, self._masks(batch), batch.select)

    @torch.no_grad()
    def reduced(self, batch: MicroBatch, reduce: Reduce, part: int) -> tuple[Tensor, ...]:
        """What `reduce` keeps of those logits, of which only `part` rows are there at a time."""
        with self._context():
            return self.model(batch.tokens, batch.positions, self._masks(batch), batch.select, reduce, part)

    @torch.no_grad()
    def values(self, batch: MicroBatch) -> Float[Tensor, " selected"]:
        """What a value head says of them, float32."""
        return self.logits(batch)[:, 0].float()

    def _masks(self, batch: MicroBatch) -> Any:
        if batch.documents is None:
            return None
        return self.model.get_attention_masks(batch.positions) if self.flex else Documents(batch.documents)

    def backward(self, loss: Float[Tensor, ""]) -> None:
        with self._context():
            loss.backward()

    def step(self, lr: float) -> float:
        """Clips the gradient, applies AdamW at this learning rate, clears the gradient. Returns the unclipped norm. At
        a learning rate of 0 the optimiser's state stays as it is, too.

        Raises FloatingPointError, and leaves the weights alone, if the norm is not finite."""
        assert self.config.optimizer is not None and self.optimizers is not None, "this model is frozen"
        most = self.config.optimizer.max_grad_norm
        norm = float(dist_utils.clip_grad_norm_(list(self.model.parameters()), most, foreach=True))
        if not norm < float("inf"):
            raise FloatingPointError(f"gradient norm is {norm}, so the loss is not finite; weights unchanged")
        if lr > 0:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
            self.optimizers.step()
        self.optimizers.zero_grad()
        return norm

    # Weights ----------------------------------------------------------------------------------------------------------

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, gathered whole, one after another. Collective.

        On a CPU none shares memory with the model: storages that numpy has seen can never be freed for others again."""
        alone = self.on_cpu and dist.get_world_size() == 1  # nothing is gathered then
        for name, value in self.adapter.to_hf(self.model.state_dict()).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            yield name, whole.clone() if alone else whole

    # Somebody else's turn on the device -------------------------------------------------------------------------------

    def free(self) -> None:
        """Everything leaves the device: parameters, gradients, the optimiser's state. Only `restore` is of use then."""
        self._parking.park()

    def restore(self) -> None:
        """It comes back, bit for bit."""
        self._parking.restore()

    def synchronize(self) -> float:
        """Waits for the device and returns time.time(): for honest intervals."""
        if not self.on_cpu:
            torch.cuda.synchronize(self.device)
        return time.time()
