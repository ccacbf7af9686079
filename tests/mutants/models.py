"""Protections against what a model's developer, or whoever made its files, states."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "values of a manifest",
        "splitup/graph/manifest_rules.py",
        "decode_canonical(data, max_bytes=limits.MAX_MANIFEST_BYTES)",
        "decode_canonical(data, max_bytes=limits.MAX_MANIFEST_BYTES, max_values=2**30)",
        "tests/graph/test_manifest.py::test_s67_the_values_of_a_manifest_are_counted",
    ),
    Mutant(
        "edges of a manifest",
        "splitup/graph/manifest.py",
        "        return self.readers.get((task, port), [])",
        "        return Manifest.readers.func(self).get((task, port), [])",
        "tests/protocol/execution/test_routes.py::"
        "test_s67_a_models_edges_are_read_once_however_many_outputs_it_has",
    ),
    Mutant(
        "hidden files",
        "deploy/splitup_deploy/frontends/own_files.py",
        'not any(part.startswith(".") for part in target.relative_to(root).parts)',
        "True",
        "tests/deploy/frontends/test_onnx.py::test_s89_external_data_are_no_hidden_file",
        is_quick=False,
    ),
    Mutant(
        "links of a model's folder",
        "deploy/splitup_deploy/frontends/own_files.py",
        'is_own = target.parent in [cache / "blobs" for cache in caches]',
        "is_own = True",
        "tests/deploy/frontends/test_huggingface.py::"
        "test_s89_a_models_folder_leads_to_no_other_file[chat_template.jinja]",
        is_quick=False,
    ),
    Mutant(
        "links of an adapter's folder",
        "deploy/splitup_deploy/frontends/huggingface/checkpoint.py",
        "validate_safetensors(check_own(path)).items()",
        "validate_safetensors(path).items()",
        "tests/deploy/frontends/test_lora.py::"
        "test_s109_an_adapters_folder_leads_to_no_other_adapter[adapter_model.safetensors]",
        is_quick=False,
    ),
    Mutant(
        "links in the current folder",
        "splitup/demo/models.py",
        "shutil.copytree(find_example(), Path(folder) / path.name).replace(path)",
        "shutil.copytree(find_example(), f'{path}.part', dirs_exist_ok=True)\n"
        "                Path(f'{path}.part').replace(path)",
        "tests/demo/test_models.py::test_s110_a_link_in_the_folder_leads_the_example_nowhere_else",
    ),
    Mutant(
        "links of a part of a file",
        "deploy/splitup_deploy/showing/progress.py",
        '"wb" if is_device else "xb"',
        '"wb"',
        "tests/deploy/showing/test_progress.py::test_s110_a_part_of_a_file_follows_no_link",
    ),
    Mutant(
        "links of a lock",
        "splitup/core/files.py",
        "os.O_CLOEXEC | os.O_NOFOLLOW",
        "os.O_CLOEXEC",
        "tests/storage/test_private_files.py::"
        "test_s123_links_in_a_folder_lead_no_command_elsewhere",
    ),
    Mutant(
        "links under a file's name",
        "splitup/core/files.py",
        "made.replace(path)",
        "path.write_text(text)",
        "tests/storage/test_private_files.py::"
        "test_s123_links_in_a_folder_lead_no_command_elsewhere",
    ),
    Mutant(
        "length of a token's text",
        "splitup/client/text/tokenizer.py",
        "if len(text) > tuning.TOKEN_CHARS * len(tokens):",
        "if False:",
        "tests/client/text/test_tokenizer.py::test_s90_a_token_is_no_long_text",
    ),
    Mutant(
        "models of strangers",
        "extras/gateway/splitup_gateway/commands/serve.py",
        "            if are_named:\n                raise",
        "            raise",
        "extras/gateway/gateway_tests/serve/test_serve_command.py::"
        "test_s91_a_strangers_model_is_left_out_and_ends_no_server",
    ),
    Mutant(
        "tasks that cannot be tried",
        "node/splitup_node/tasks/audit.py",
        "except SplitUpError as error:  # anybody",
        "except (TaskFailed, WorkerLost) as error:  # anybody",
        "tests/node/tasks/test_audit.py::test_s92_a_task_that_cannot_be_tried_is_a_row",
    ),
    Mutant(
        "tasks that no machine passes",
        "node/splitup_node/tasks/audit.py",
        "if not any(row.verdict and row.may_serve for row in rows):",
        "if refused:",
        "tests/node/tasks/test_audit.py::test_s92_a_strangers_task_keeps_nobody_from_staking[1]",
    ),
    Mutant(
        "models in use when nodes trade",
        "node/splitup_node/tasks/placement.py",
        "    if wanted.used and not given.used:\n        return True\n",
        "",
        "tests/node/tasks/test_placement.py::"
        "test_s101_a_model_in_use_takes_the_memory_of_one_that_nobody_uses",
    ),
    Mutant(
        "models without files",
        "node/splitup_node/committee/presence.py",
        "what, retry_s = choice.model_id, tuning.LOAD_FETCH_RETRY_S",
        "return",
        "tests/node/tasks/test_placement.py::"
        "test_s100_a_model_without_files_stops_nobody_from_loading_others",
    ),
    Mutant(
        "fees of a model",
        "splitup/protocol/committee/context.py",
        "if fee >= least}",
        "if fee}",
        "tests/protocol/committee/test_context.py::"
        "test_s107_a_model_is_in_use_by_what_its_users_lose",
    ),
    Mutant(
        "fees that few pay",
        "splitup/protocol/committee/context.py",
        "            del self._totals[min(self._totals, key=self._totals.__getitem__)]\n",
        "            pass\n",
        "tests/protocol/committee/test_context.py::test_s107_few_fees_are_kept",
    ),
    Mutant(
        "fees on the chain",
        "oracle/splitup_oracle/member/chain_events.py",
        ', args["fee"])',
        ', args["paid"])',
        "tests/oracle/member/test_latest_models.py::test_s107_the_fee_is_what_the_chain_says",
    ),
    Mutant(
        "tasks that one member lists",
        "node/splitup_node/tasks/placement.py",
        "        if len(said) > few\n",
        "",
        "tests/node/tasks/test_placement.py::"
        "test_s114_one_member_invents_no_tasks_and_understates_no_holders",
    ),
    Mutant(
        "holders by one member's word",
        "node/splitup_node/tasks/placement.py",
        "sorted(entry.holders for entry in said)[few]",
        "min(entry.holders for entry in said)",
        "tests/node/tasks/test_placement.py::"
        "test_s114_one_member_invents_no_tasks_and_understates_no_holders",
    ),
    Mutant(
        "members that say what is used",
        "node/splitup_node/tasks/placement.py",
        "sum(entry.used for entry in said) > few",
        "sum(entry.used for entry in said) > 0",
        "tests/node/tasks/test_placement.py::"
        "test_s101_models_in_use_have_enough_operators_before_others_are_loaded",
    ),
    Mutant(
        "manifests that nobody stores",
        "oracle/splitup_oracle/member/service.py",
        "pause_s = min(2 * pauses[name][1], _MISSING_S)",
        "pause_s = _RETRY_S",
        "tests/oracle/member/test_latest_models.py::"
        "test_s108_a_manifest_that_nobody_stores_is_asked_for_less_and_less",
    ),
    Mutant(
        "models in use on the list of demand",
        "splitup/protocol/snapshots/demand.py",
        'key=lambda row: (not row["used"], row["holders"],',
        'key=lambda row: (row["holders"],',
        "tests/protocol/snapshots/test_demand.py::"
        "test_s101_models_in_use_are_listed_whatever_is_registered",
    ),
    Mutant(
        "models in use when nodes load",
        "node/splitup_node/tasks/placement.py",
        "            not (entry.used and _is_scarce(entry)),\n",
        "",
        "tests/node/tasks/test_placement.py::"
        "test_s101_models_in_use_have_enough_operators_before_others_are_loaded",
    ),
    Mutant(
        "models that a new node tries",
        "node/splitup_node/tasks/audit.py",
        "            if self._passed and not count(model_id):\n                return\n",
        "",
        "tests/node/tasks/test_audit.py::test_s98_models_that_nobody_holds_cost_a_new_node_nothing",
    ),
    Mutant(
        "models that operators hold",
        "node/splitup_node/tasks/audit.py",
        "sorted(models, key=count, reverse=True)",
        "list(models)",
        "tests/node/tasks/test_audit.py::test_s98_models_that_nobody_holds_cost_a_new_node_nothing",
    ),
    Mutant(
        "tasks that a new node tries",
        "node/splitup_node/tasks/audit.py",
        "if is_full or len(self.rows) == tuning.AUDIT_TASKS:",
        "if is_full:",
        "tests/node/tasks/test_audit.py::test_s98_a_new_node_tries_as_many_tasks_as_it_can_hold",
    ),
    Mutant(
        "one model's words in an audit",
        "node/splitup_node/tasks/audit.py",
        "        self._tried.add((model_id, task.task_id))\n",
        "        self._tried.add((model_id, task.task_id))\n"
        "        self._passed.add(task.task_id)\n",
        "tests/node/tasks/test_audit.py::test_s98_a_copy_does_not_stand_for_the_tasks_of_a_model",
    ),
    Mutant(
        "model of a name",
        "splitup/client/models.py",
        "if name not in self._ids:",
        "if True:",
        "tests/client/test_models.py::test_s93_a_name_stays_the_model_that_it_was",
    ),
    Mutant(
        "words of each model about a task",
        "splitup/protocol/snapshots/demand.py",
        "if (model_id, task.task_id) in rows:",
        "if any(task.task_id == known for _, known in rows):",
        "tests/protocol/snapshots/test_demand.py::test_s95_false_words_about_a_task_hide_no_others",
    ),
    Mutant(
        "tasks that failed by another model's words",
        "node/splitup_node/tasks/placement.py",
        "entry.task_id not in loaded\n"
        "        and entry.key not in excluded\n        and entry.vram",
        "entry.task_id not in loaded\n"
        "        and entry.task_id not in {task for _, task in excluded}\n        and entry.vram",
        "tests/node/tasks/test_placement.py::"
        "test_s95_what_one_model_says_of_a_task_says_nothing_of_anothers_words",
    ),
    Mutant(
        "audits by another model's vectors",
        "node/splitup_node/tasks/loaded_tasks.py",
        "            if (model_id, task.task_id) in self._failed:\n"
        "                raise AuditFailed(self._failed[model_id, task.task_id])\n            if",
        "            for known, why in self._failed.items():\n"
        "                if known[1] == task.task_id:\n                    raise AuditFailed(why)\n"
        "            if",
        "tests/node/tasks/test_audit.py::test_s95_false_vectors_of_a_task_stop_no_other_model",
        is_quick=False,
    ),
    Mutant(
        "files of outputs",
        "splitup/cli/commands/run.py",
        ".replace('/', '%2F')",
        "",
        "tests/cli/test_run.py::test_s68_an_output_is_written_into_the_directory_that_was_given",
    ),
    Mutant(
        "words in a terminal",
        "splitup/cli/console.py",
        "yield Segment(printable_lines(segment.text), segment.style)",
        "yield segment",
        "tests/cli/test_console.py::test_s65_a_terminal_obeys_nobody_but_the_program",
    ),
    Mutant(
        "id of a device's model",
        "extras/private/splitup_private/split/client.py",
        'key = "model_id" if model.startswith("0x") else "name"',
        'key = "name"',
        "extras/gateway/gateway_tests/split/test_client.py::"
        "test_s128_a_models_id_opens_no_other_model",
        is_quick=False,
    ),
    Mutant(
        "digest of an adapter",
        "extras/private/splitup_private/adapters/client.py",
        "if getattr(info, key) == expert:",
        "if expert in (info.name, info.adapter):",
        "extras/private/private_tests/adapters/test_choice.py::"
        "test_s128_no_adapters_name_passes_for_anothers_digest",
    ),
    Mutant(
        "patterns of modules",
        "deploy/splitup_deploy/frontends/huggingface/quantised_layers.py",
        """if "".join(pieces) != body.removesuffix("$") or math""",
        "if math",
        "tests/deploy/frontends/test_quantised.py::test_s129_a_pattern_of_modules_takes_no_time",
        is_quick=False,
    ),
    Mutant(
        "memory of a shape",
        "deploy/splitup_deploy/frontends/huggingface/quantised_layers.py",
        "        def make(first: int, rows: int) -> Array:\n"
        "            group_of = np.arange(count) * elements // self.group\n",
        "        group_of = np.arange(count) * elements // self.group\n\n"
        "        def make(first: int, rows: int) -> Array:\n",
        "tests/deploy/frontends/test_quantised.py::"
        "test_s133_a_layer_of_which_only_the_shape_is_known_takes_no_memory",
        is_quick=False,
    ),
    Mutant(
        "names of an ONNX file",
        "deploy/splitup_deploy/frontends/onnx/model_file.py",
        "        result = base\n        while",
        "        result = base\n        self.names[base] = 1\n        while",
        "tests/deploy/frontends/test_onnx.py::"
        "test_s130_a_name_is_found_at_once_however_often_it_stands",
        is_quick=False,
    ),
    Mutant(
        "constants of an ONNX file",
        "deploy/splitup_deploy/frontends/onnx/model_file.py",
        " or self.elements_left < 0",
        "",
        "tests/deploy/frontends/test_onnx.py::"
        "test_s130_all_constants_of_a_model_that_shapes_depend_on_are_bounded",
        is_quick=False,
    ),
    Mutant(
        "steps of an exported model",
        "extras/edge/splitup_edge/program.py",
        "if nbytes > limits.MAX_TENSOR_BYTES:",
        "if False:",
        "extras/edge/edge_tests/edge/test_confined_program.py::"
        "test_s132_the_arrays_of_a_step_are_bounded",
    ),
)
