"""NeuCLIP in a Hugging Face `Trainer` with `CLIPModel`:

python examples/hugging_face_trainer.py
python examples/hugging_face_trainer.py --resume --epochs 12
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tiny_data import CONTEXT_LENGTH, END, SIDE, VOCABULARY, Shapes

import neuclip.models  # noqa: F401 - lets a torchvision for CUDA import beside a CPU-only torch
from neuclip import NeuCLIP

# isort: split
from transformers import CLIPConfig, CLIPModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

EMBED_DIM = 64


class ContrastiveTrainer(Trainer):
    def __init__(self, *arguments, objective, **named):
        super().__init__(*arguments, **named)
        self.objective = objective

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        sample_ids = inputs.pop("sample_ids")
        outputs = model(**inputs)
        logit_scale = self.accelerator.unwrap_model(model).logit_scale.exp()
        self.objective.train(model.training)  # an evaluation must teach the prototypes nothing
        loss = self.objective(outputs.image_embeds, outputs.text_embeds, logit_scale, sample_ids=sample_ids)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *rest):
        measured = self.objective.metrics
        super().log({**logs, **{name: measured[name] for name in ("accuracy", "calibration")}}, *rest)


class SaveObjective(TrainerCallback):
    def __init__(self, objective):
        self.objective = objective

    def on_save(self, args, state, control, **unused):
        saved = self.objective.state_dict()  # on every rank, as each holds a part of it
        if args.should_save:
            torch.save(saved, Path(args.output_dir) / f"checkpoint-{state.global_step}" / "objective.pt")


def tiny_model() -> CLIPModel:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    words = {"vocab_size": len(VOCABULARY), "max_position_embeddings": CONTEXT_LENGTH, "bos_token_id": 0}
    text, image = size | words | {"eos_token_id": END}, size | {"image_size": SIDE, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=EMBED_DIM))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="in all, those before --resume too")
    parser.add_argument("--folder", default="runs/hugging_face_trainer")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    arguments = parser.parse_args()
    settings = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 32}
    settings |= {"logging_strategy": "epoch", "save_strategy": "epoch", "disable_tqdm": True, "report_to": "none"}
    settings |= {"remove_unused_columns": False, "use_cpu": not torch.cuda.is_available()}  # CLIP knows no sample_ids
    settings = TrainingArguments(arguments.folder, num_train_epochs=arguments.epochs, **settings)
    torch.manual_seed(0)
    objective = NeuCLIP(embed_dim=EMBED_DIM, num_prototypes=512, restart_every=16, inner_steps=3, network_lr=0.01)
    if last := get_last_checkpoint(arguments.folder) if arguments.resume else None:
        objective.load_state_dict(torch.load(Path(last) / "objective.pt", weights_only=True))
    given = {"train_dataset": Shapes(), "callbacks": [SaveObjective(objective)], "objective": objective}
    ContrastiveTrainer(tiny_model(), settings, **given).train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
