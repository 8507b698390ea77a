"""What a drafter or policy says to others when it is saved or pushed: no path of this machine, and a card in any case.

The classes name their auto class, so transformers writes their code next to the weights, and the folder loads without
this package. Knows nothing of what weights and settings mean.
"""

import copy
import os
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", flags=re.ASCII)
# Part of the form to be filled in that transformers pushes where a repository has no card.
_EMPTY_CARD = "[More Information Needed]"


def is_local_path(name: str) -> bool:
    """Whether a name means something on this machine only: a path as paths are written, or a folder that is there."""
    return name.startswith(("/", "~", ".")) or "\\" in name or name[1:2] == ":" or os.path.isdir(name)


def is_hub_id(name: str) -> bool:
    """Whether a name reads as `namespace/name` and is not a folder here."""
    return _HUB_ID.fullmatch(name) is not None and not is_local_path(name)


def _last_part(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]


class SharedConfig(PreTrainedConfig):
    """
    A config that is written without paths of this machine. Of models that it was made for the last part stays, which is
    what they are compared by. An absolute folder of a policy becomes one relative to the folder that is written.
    """

    _auto_class = "AutoConfig"

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As [`~transformers.PreTrainedConfig.save_pretrained`], without paths of this machine."""
        config = self.for_others(None if push_to_hub else save_directory)
        super(SharedConfig, config).save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As [`~transformers.PreTrainedConfig.push_to_hub`], without paths of this machine."""
        return super(SharedConfig, self.for_others()).push_to_hub(repo_id, **kwargs)

    def for_others(self, folder: str | os.PathLike | None = None) -> Any:
        """
        A copy as it may be read elsewhere.

        Args:
            folder (`str`, *optional*):
                Where it is written to. Without, it is pushed: then a policy has to be a Hub id, and another one is
                left out with a warning.
        """
        config: Any = copy.deepcopy(self)
        for field in ("target_name_or_path", "drafter_name_or_path"):
            name = getattr(config, field, None)
            if name and is_local_path(name):
                setattr(config, field, _last_part(name) or None)
        policy = getattr(config, "policy", None)
        if not policy:
            return config
        if folder is not None and not os.path.isabs(policy) and not policy.startswith("~"):
            return config  # counts from the drafter's own folder, and moves with it
        if folder is not None and os.path.isdir(policy):
            config.policy = os.path.relpath(policy, os.path.abspath(folder))
        elif not is_hub_id(policy) or Path(config.name_or_path or "", policy).is_dir():
            logger.warning(
                f"The drafter's `config.policy` is the folder '{policy}', which others do not have: the config that is "
                f"{'pushed' if folder is None else 'saved'} names none. Push the policy, set `drafter.config.policy` "
                "to its Hub id, and do this again."
            )
            config.policy = config.policy_revision = None
        return config


class SharedModel(PreTrainedModel):
    """A model that is written with a card where there is none, and whose config is a [`SharedConfig`]."""

    _auto_class = "AutoModel"
    # Of the card: what the model is, what to call it, and its tags.
    _card_name: str = ""
    _card_text: str = ""
    _card_tags: tuple[str, ...] = ()

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        As [`~transformers.PreTrainedModel.save_pretrained`], with the code of the classes and a card. One that is there
        stays.
        """
        of_push = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")
        hub_kwargs: dict[str, Any] = {key: kwargs.pop(key) for key in of_push if key in kwargs}
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if os.path.isfile(save_directory) or not self.should_save_on_this_rank(is_main_process):
            return
        card = Path(save_directory, "README.md")
        if not card.exists():
            card.write_text(self._card("path/to/this/folder"), encoding="utf-8")
        if push_to_hub:
            repo_id = hub_kwargs.pop("repo_id", Path(save_directory).name)
            hub_kwargs.update({key: kwargs[key] for key in ("token", "max_shard_size") if key in kwargs})
            self.push_to_hub(repo_id, **hub_kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As [`~transformers.PreTrainedModel.push_to_hub`], without paths of this machine."""
        shared = copy.copy(self)  # weights are shared; the config is another one
        shared.config = self.config.for_others()
        shared._pushed_tags = tuple(kwargs.get("tags") or ())
        return super(SharedModel, shared).push_to_hub(repo_id, **kwargs)

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        card = Path(working_dir, "README.md")
        if card.is_file() and _EMPTY_CARD in card.read_text(encoding="utf-8"):
            card.write_text(self._card(repo_id, getattr(self, "_pushed_tags", ())), encoding="utf-8")
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _card(self, name: str, tags: tuple[str, ...] = ()) -> str:
        """A `README.md` with what is known for certain, loadable from `name`."""
        target = self.config.target_name_or_path
        base_model = f"base_model: {target}\n" if target and is_hub_id(target) else ""
        title = f"{self._card_name} for {_last_part(target)}" if target else self._card_name
        listed = "".join(f"- {tag}\n" for tag in dict.fromkeys([*self._card_tags, *tags]))
        variable = self._card_name.split()[-1]
        return f"""\
---
{base_model}library_name: transformers
tags:
{listed}---

# {title}

{self._card_text}

```python
from transformers import AutoModel

{variable} = AutoModel.from_pretrained("{name}", trust_remote_code=True)  # its code lies beside the weights
```
"""


__all__ = ["SharedConfig", "SharedModel", "is_hub_id", "is_local_path"]
