"""NeuCLIP in a Hugging Face `Trainer` with `CLIPModel`:

python examples/hugging_face_trainer.py
python examples/hugging_face_trainer.py --resume --epochs 12
python examples/hugging_face_trainer.py --micro-batch-size 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tiny_data import CONTEXT_LENGTH, END, SIDE, VOCABULARY, Shapes

import neuclip.models  # noqa: F401 - lets a torchvision for CUDA import beside a CPU-only torch
from neuclip import LargeBatch, NeuCLIP

# isort: split
from transformers import CLIPConfig, CLIPModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

EMBED_DIM = 64


class Towers(torch.nn.Module):
    """A `CLIPModel` that returns what an objective needs, as the tuple that `LargeBatch` expects."""

    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def forward(self, pixel_values, input_ids):
        outputs = self.clip(pixel_values=pixel_values, input_ids=input_ids)
        return outputs.image_embeds, outputs.text_embeds, self.clip.logit_scale.exp()


class ContrastiveTrainer(Trainer):
    def __init__(self, *arguments, objective, **named):
        super().__init__(*arguments, **named)
        self.objective = objective

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        image, text, logit_scale = model(inputs["pixel_values"], inputs["input_ids"])
        self.objective.train(model.training)  # the prototypes must not learn from evaluation data
        loss = self.objective(image, text, logit_scale, sample_ids=inputs["sample_ids"])
        return (loss, {"image_embeds": image, "text_embeds": text}) if return_outputs else loss

    def log(self, logs, *rest):
        measured = self.objective.metrics
        super().log({**logs, **{name: measured[name] for name in ("accuracy", "calibration")}}, *rest)


class SaveObjective(TrainerCallback):
    def __init__(self, objective):
        self.objective = objective

    def on_save(self, args, state, control, **unused):
        saved = self.objective.state_dict()  # on every rank, because each holds a part of the state
        if args.should_save:
            torch.save(saved, Path(args.output_dir) / f"checkpoint-{state.global_step}" / "objective.pt")


def tiny_model() -> CLIPModel:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    words = {"vocab_size": len(VOCABULARY), "max_position_embeddings": CONTEXT_LENGTH, "bos_token_id": 0}
    text, image = size | words | {"eos_token_id": END}, size | {"image_size": SIDE, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=EMBED_DIM))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="total epochs, including those before --resume")
    parser.add_argument("--folder", default="runs/hugging_face_trainer")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    parser.add_argument("--micro-batch-size", type=int, default=0, help="pairs per forward pass; 0: the whole batch")
    arguments = parser.parse_args()
    settings = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 32}
    settings |= {"logging_strategy": "epoch", "save_strategy": "epoch", "disable_tqdm": True, "report_to": "none"}
    settings |= {"remove_unused_columns": False, "use_cpu": not torch.cuda.is_available()}  # keeps sample_ids
    settings = TrainingArguments(arguments.folder, num_train_epochs=arguments.epochs, **settings)
    torch.manual_seed(0)
    objective = NeuCLIP(embed_dim=EMBED_DIM, num_prototypes=512, restart_every=16, inner_steps=3, network_lr=0.01)
    if last := get_last_checkpoint(arguments.folder) if arguments.resume else None:
        objective.load_state_dict(torch.load(Path(last) / "objective.pt", weights_only=True))
    options = {"train_dataset": Shapes(), "callbacks": [SaveObjective(objective)], "objective": objective}
    clip = tiny_model()
    model = LargeBatch(Towers(clip), micro_batch_size=arguments.micro_batch_size)  # Trainer wraps it in DDP
    ContrastiveTrainer(model, settings, **options).train(resume_from_checkpoint=last)
    clip.save_pretrained(Path(arguments.folder) / "clip")  # for `CLIPModel.from_pretrained`


if __name__ == "__main__":
    main()
