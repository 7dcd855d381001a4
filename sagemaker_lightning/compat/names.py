"""Every private name of other packages that the modules here need.

No documentation promises these names. test_compat.py looks each of them up, in a second, and
names those that have moved and who needs them. It also fails if a module here uses a private name
that is missing here. A name is `function`, `Class` or `Class.attribute` of a module; what it has to
be is one of:

    class, property, value    what it says
    attribute                 an attribute that the class gives its objects
    local                     a variable within a function
    (self, batch, ...)        a function with these parameters; "..." for more of them

Several of them are separated by " | ". This module has data only: nothing is imported.
"""

FIT = "pytorch_lightning.loops.fit_loop"
EPOCH = "pytorch_lightning.loops.training_epoch_loop"
EVALUATION = "pytorch_lightning.loops.evaluation_loop"
FETCHERS = "pytorch_lightning.loops.fetchers"
COMBINED = "pytorch_lightning.utilities.combined_loader"
CONNECTORS = "pytorch_lightning.trainer.connectors"
RESULT = f"{CONNECTORS}.logger_connector.result"
CALLBACKS = "pytorch_lightning.callbacks"
TRAINER = "pytorch_lightning.trainer.trainer"

NEEDS: dict[str, dict[str, dict[str, str]]] = {
    "lightning_loops": {
        "pytorch_lightning.loops.loop": {"_Loop": "class", "_Loop.restarting": "property"},
        "pytorch_lightning.loops.optimization.automatic": {
            "_AutomaticOptimization.optim_progress": "attribute"
        },
        "pytorch_lightning.loops.optimization.manual": {
            "_ManualOptimization.optim_step_progress": "attribute"
        },
        "pytorch_lightning.loops.progress": {
            "_OptimizationProgress.optimizer_steps": "property",
            "_ProcessedTracker": "class",
        },
        FIT: {
            "_FitLoop": "class",
            "_FitLoop._combined_loader": "attribute",
            "_FitLoop._data_fetcher": "attribute",
            "_FitLoop._data_source": "attribute",
            "_FitLoop._last_train_dl_reload_epoch": "attribute",
            "_FitLoop._should_reload_train_dl": "property",
            "_FitLoop.done": "property",
            "_FitLoop.epoch_loop": "attribute",
            "_FitLoop.epoch_progress": "attribute",
            "_FitLoop.on_advance_end": "(self)",
            "_FitLoop.on_run_end": "(self)",
            "_FitLoop.on_run_start": "(self)",
            "_FitLoop.reset": "(self)",
            "_FitLoop.run": "(self)",
            "_FitLoop.setup_data": "(self)",
        },
        EPOCH: {
            "_TrainingEpochLoop": "class",
            "_TrainingEpochLoop._broadcast_sigterm_tensor": "(self)",
            "_TrainingEpochLoop._is_training_done": "property",
            "_TrainingEpochLoop._num_ready_batches_reached": "(self)",
            "_TrainingEpochLoop._on_after_fetch": "(self)",
            "_TrainingEpochLoop._on_before_fetch": "(self)",
            "_TrainingEpochLoop._should_accumulate": "(self)",
            "_TrainingEpochLoop.automatic_optimization": "attribute",
            "_TrainingEpochLoop.batch_progress": "attribute",
            "_TrainingEpochLoop.done": "property",
            "_TrainingEpochLoop.manual_optimization": "attribute",
            "_TrainingEpochLoop.on_advance_end": "(self, data_fetcher)",
            "_TrainingEpochLoop.on_run_start": "(self, data_fetcher)",
            "_TrainingEpochLoop.reset": "(self)",
            "_TrainingEpochLoop.val_loop": "attribute",
        },
        EVALUATION: {
            "_EvaluationLoop": "class",
            "_EvaluationLoop._combined_loader": "attribute",
            "_EvaluationLoop._has_run": "attribute",
            "_EvaluationLoop._last_val_dl_reload_epoch": "attribute",
            "_EvaluationLoop._on_evaluation_model_train": "(self)",
            "_EvaluationLoop._seen_batches_per_dataloader": "attribute",
            "_EvaluationLoop.run": "(self, ...)",
        },
        FETCHERS: {
            "_DataFetcher._start_profiler": "attribute",
            "_DataFetcher._stop_profiler": "attribute",
            "_DataFetcher.done": "attribute",
            "_DataFetcher.fetched": "attribute",
            "_DataLoaderIterDataFetcher": "class",
            "_PrefetchDataFetcher.batches": "attribute",
            "_PrefetchDataFetcher.prefetch_batches": "attribute",
        },
        "pytorch_lightning": {
            "LightningModule._on_before_batch_transfer": "(self, batch, dataloader_idx)"
        },
        TRAINER: {"Trainer._signal_connector": "attribute"},
        f"{CONNECTORS}.signal_connector": {"_SignalConnector.received_sigterm": "attribute"},
    },
    "lightning_loaders": {
        COMBINED: {
            "CombinedLoader._iterator": "attribute",
            "CombinedLoader._limits": "attribute",
            "CombinedLoader._mode": "attribute",
            "CombinedLoader._state_dicts": "(self)",
            "_MaxSizeCycle": "class",
            "_MaxSizeCycle._consumed": "attribute",
            "_ModeIterator._idx": "attribute",
            "_ModeIterator.iterators": "attribute",
            "_SUPPORTED_MODES": "value",
        },
        TRAINER: {
            "Trainer._accelerator_connector": "attribute",
            "Trainer._data_connector": "attribute",
        },
        f"{CONNECTORS}.data_connector": {
            "_DataConnector._prepare_dataloader": "(self, dataloader, shuffle, mode)",
            "_DataConnector._requires_distributed_sampler": "(self, dataloader)",
            "_DataConnector.prepare_data": "(self)",
        },
        f"{CONNECTORS}.accelerator_connector": {
            "_AcceleratorConnector.use_distributed_sampler": "attribute"
        },
    },
    "lightning_checkpoints": {
        TRAINER: {"Trainer._checkpoint_connector": "attribute"},
        "pytorch_lightning": {"LightningModule._current_fx_name": "attribute"},
        f"{CONNECTORS}.checkpoint_connector": {
            "_CheckpointConnector._ckpt_path": "attribute",
            "_CheckpointConnector._loaded_checkpoint": "attribute",
            "_CheckpointConnector.dump_checkpoint": "(self, weights_only)",
            "_CheckpointConnector.restore_datamodule": "(self)",
            "_CheckpointConnector.restore_loops": "(self)",
            "_CheckpointConnector.restore_lr_schedulers": "(self)",
            "_CheckpointConnector.restore_optimizers_and_schedulers": "(self)",
            "_CheckpointConnector.resume_start": (
                "(self, checkpoint_path, weights_only) | (self, checkpoint_path)"
            ),
        },
        CALLBACKS: {
            "ModelCheckpoint._defer_save_until_validation": "attribute | absent",
            "ModelCheckpoint._last_checkpoint_saved": "attribute",
            "ModelCheckpoint._last_global_step_saved": "attribute",
            "ModelCheckpoint._remove_checkpoint": "(self, trainer, filepath)",
            "ModelCheckpoint._save_checkpoint": "(self, trainer, filepath)",
            "ModelCheckpoint._save_topk_checkpoint": "(self, trainer, monitor_candidates)",
            "ModelCheckpoint._update_best_and_save": "(self, current, trainer, monitor_candidates)",
        },
    },
    "lightning_metrics": {
        TRAINER: {"Trainer._logger_connector": "attribute"},
        f"{CONNECTORS}.logger_connector.logger_connector": {
            "_LoggerConnector._callback_metrics": "attribute",
            "_LoggerConnector._first_loop_iter": "attribute",
            "_LoggerConnector._logged_metrics": "attribute",
            "_LoggerConnector._progress_bar_metrics": "attribute",
        },
        EPOCH: {"_TrainingEpochLoop._results": "attribute"},
        RESULT: {
            "_Metadata": "class",
            "_Metadata.__init__": "(self, fx, name, prog_bar, logger, on_step, on_epoch, "
            "reduce_fx, enable_graph, "
            "add_dataloader_idx, dataloader_idx, metric_attribute, _sync)",
            "_Metadata.sync": "property",
            "_ResultMetric": "class",
            "_ResultMetric.__init__": "(self, metadata, is_tensor)",
            "_ResultMetric.has_reset": "attribute",
            "_ResultMetric.value": "attribute",
            "_Sync": "class",
            "_Sync.__init__": "(self, fn, _should, rank_zero_only, _op, _group)",
            "_Sync.group": "property",
            "_Sync.op": "property",
            "_Sync.should": "property",
        },
        "torchmetrics": {"Metric._defaults": "attribute", "Metric._forward_cache": "attribute"},
    },
    "metrics": {
        "torchmetrics": {
            "Metric._computed": "attribute",
            "Metric._defaults": "attribute",
            "Metric._reductions": "attribute",
            "Metric._update_count": "attribute",
        }
    },
    "lightning_callbacks": {
        CALLBACKS: {
            "BatchSizeFinder._batch_arg_name": "attribute",
            "BatchSizeFinder._early_exit": "attribute",
            "LearningRateFinder._attr_name": "attribute",
            "LearningRateFinder._early_exit": "attribute",
            "LearningRateFinder._max_lr": "attribute",
            "LearningRateFinder._min_lr": "attribute",
            "LearningRateFinder._mode": "attribute",
            "LearningRateFinder._num_training_steps": "attribute",
            "ModelPruning._make_pruning_permanent": "attribute",
            "ModelPruning._original_layers": "attribute",
            "ModelPruning._parameters_to_prune": "attribute",
            "StochasticWeightAveraging._accumulate_grad_batches": "attribute",
            "StochasticWeightAveraging._latest_update_epoch": "attribute",
            "StochasticWeightAveraging._scheduler_state": "attribute",
            "ThroughputMonitor._batches": "attribute | absent",
            "ThroughputMonitor._lengths": "attribute",
            "ThroughputMonitor._samples": "attribute | absent",
        },
        f"{CALLBACKS}.spike": {"SpikeDetection.running_mean": "attribute"},
        "pytorch_lightning": {"LightningModule._current_fx_name": "attribute"},
        "pytorch_lightning.trainer.call": {
            "_call_callback_hooks": "(trainer, hook_name, args, ...)",
            "_call_lightning_module_hook": "(trainer, hook_name, args, ...)",
            "_call_strategy_hook": "(trainer, hook_name, args, kwargs)",
        },
        "pytorch_lightning.tuner.lr_finder": {
            "_LRFinder": "class",
            "_LRFinder._optimal_idx": "attribute",
        },
    },
    "lightning_trainer": {
        "pytorch_lightning.strategies": {
            "DDPStrategy._ddp_kwargs": "attribute",
            "DDPStrategy._model_averager": "attribute",
            "DDPStrategy._start_method": "attribute",
        },
        "pytorch_lightning": {
            "LightningModule._compiler_ctx": "attribute",
            "LightningModule._hparams_initial": "attribute",
            "LightningModule._trainer": "attribute",
        },
        f"{CONNECTORS}.callback_connector": {"_CallbackConnector._default_root_dir": "attribute"},
        EVALUATION: {"_EvaluationLoop._last_val_time": "attribute | absent"},
        TRAINER: {
            "Trainer._accelerator_connector": "attribute",
            "Trainer._callback_connector": "attribute",
            "Trainer._checkpoint_connector": "attribute",
            "Trainer._data_connector": "attribute",
            "Trainer._detect_anomaly": "attribute",
            "Trainer._logger_connector": "attribute",
            "Trainer._loggers": "attribute | absent",
            "Trainer._model_registry": "attribute",
            "Trainer._signal_connector": "attribute",
            "Trainer._teardown": "(self)",
        },
        f"{CONNECTORS}.signal_connector": {
            "_SignalConnector.register_signal_handlers": "(self)",
        },
        "pytorch_lightning.trainer.setup": {
            "_init_debugging_flags._val_check_time_interval": "local | absent"
        },
    },
    "model_parallel": {
        "pytorch_lightning.strategies": {
            "ModelParallelStrategy._data_parallel_size": "attribute",
            "ModelParallelStrategy._tensor_parallel_size": "attribute",
        }
    },
    "torch_store": {
        "torch.distributed.rendezvous": {
            "_create_c10d_store": "(hostname, port, rank, ...)",
        }
    },
    "dtensors": {
        "torch.distributed.tensor": {"DTensor.__create_chunk_list__": "(self)"},
        "torch.distributed.tensor.placement_types": {"_StridedShard": "class"},
    },
    "lightning_loggers": {
        "pytorch_lightning.loggers": {
            "CSVLogger._version": "attribute",
            "TensorBoardLogger._version": "attribute",
            "CSVLogger._experiment": "attribute",
            "TensorBoardLogger._experiment": "attribute",
            "CSVLogger._get_next_version": "(self)",
            "TensorBoardLogger._get_next_version": "(self)",
        }
    },
    "csv_logger": {
        "pytorch_lightning.loggers": {
            "CSVLogger._experiment": "attribute",
            "CSVLogger._fs": "attribute",
        },
        "pytorch_lightning.loggers.csv_logs": {
            "ExperimentWriter._check_log_dir_exists": "(self)",
            "ExperimentWriter._fs": "attribute",
            "ExperimentWriter._rewrite_with_new_header": "(self, fieldnames)",
            "ExperimentWriter.metrics_file_path": "attribute",
            "ExperimentWriter.metrics_keys": "attribute",
        },
    },
    "tensorboard_logger": {
        "pytorch_lightning.loggers": {"TensorBoardLogger._experiment": "attribute"},
        "torch.utils.tensorboard": {"SummaryWriter._get_file_writer": "(self)"},
        "tensorboard.summary.writer.event_file_writer": {"time": "value"},
    },
    "mlflow_logger": {
        "pytorch_lightning.loggers": {
            "MLFlowLogger._experiment_name": "attribute",
            "MLFlowLogger._mlflow_client": "attribute",
            "MLFlowLogger._run_id": "attribute",
            "MLFlowLogger._tracking_uri": "attribute",
        }
    },
    "wandb_logger": {
        "pytorch_lightning.loggers": {
            "WandbLogger._id": "attribute",
            "WandbLogger._wandb_init": "attribute",
        }
    },
    "torch_data": {
        "torch.utils.data": {
            "DataLoader._get_iterator": "(self)",
            "DataLoader._index_sampler": "property",
            "DataLoader._iterator": "attribute",
            "_DatasetKind": "class",
            "_DatasetKind.Map": "value",
            "_DatasetKind.create_fetcher": "(kind, dataset, auto_collation, collate_fn, drop_last)",
        },
        "litdata": {
            "CombinedStreamingDataset._datasets": "attribute",
            "ParallelStreamingDataset._datasets": "attribute",
        },
        "torchdata.stateful_dataloader.stateful_dataloader": {
            "_ITERATOR_FINISHED": "value",
            "_StatefulMultiProcessingDataLoaderIter._SNAPSHOT": "value",
            "_StatefulMultiProcessingDataLoaderIter._WORKER_SNAPSHOTS": "value",
            "_StatefulMultiProcessingDataLoaderIter._worker_snapshots": "attribute",
        },
        "torch.utils.data.dataloader": {
            "_BaseDataLoaderIter": "class",
            "_BaseDataLoaderIter._index_sampler": "attribute",
            "_BaseDataLoaderIter._next_index": "(self)",
            "_BaseDataLoaderIter._sampler_iter": "attribute",
            "_SingleProcessDataLoaderIter": "class",
            "_MultiProcessingDataLoaderIter._shutdown_workers": "(self)",
        },
        "threading": {
            "Thread._target": "attribute",
        },
        "torch.utils.data._utils.fetch": {
            "_IterableDatasetFetcher.dataset_iter": "attribute",
            "_MapDatasetFetcher.fetch": "(self, possibly_batched_index)",
        },
    },
    "torch_modules": {
        "torch.jit": {"RecursiveScriptModule._concrete_type": "attribute"},
        "torch.nn.parallel": {"DistributedDataParallel._comm_hooks": "attribute"},
        "torch.nn": {
            "Module._backward_hooks": "attribute",
            "Module._backward_pre_hooks": "attribute",
            "Module._buffers": "attribute",
            "Module._forward_hooks": "attribute",
            "Module._forward_pre_hooks": "attribute",
            "Module._is_full_backward_hook": "attribute",
            "Module._load_state_dict_pre_hooks": "attribute",
            "Module._metadata": "attribute",
            "Module._modules": "attribute",
            "Module._non_persistent_buffers_set": "attribute",
            "Module._parameters": "attribute",
            "Module._save_to_state_dict": "(self, destination, prefix, keep_vars)",
            "Module._state_dict_hooks": "attribute",
            "Module._state_dict_pre_hooks": "attribute",
        },
        "torch": {
            "Tensor._indices": "value",
            "Tensor._post_accumulate_grad_hooks": "attribute",
            "Tensor._values": "value",
            "Tensor._version": "value",
        },
        "torch._dynamo.eval_frame": {"OptimizedModule._orig_mod": "attribute"},
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": {
            "ActivationWrapper._checkpoint_wrapped_module": "attribute"
        },
        "torch.nn.modules.module": {
            "_global_backward_hooks": "value",
            "_global_backward_pre_hooks": "value",
            "_global_forward_hooks": "value",
            "_global_forward_pre_hooks": "value",
        },
        "torch.nn.modules.lazy": {"LazyModuleMixin._infer_parameters": "(self, module, args, ...)"},
        "torch.optim": {
            "Optimizer._optimizer_step_post_hooks": "attribute",
            "Optimizer._optimizer_step_pre_hooks": "attribute",
        },
        "torch.optim.lr_scheduler": {
            "ChainedScheduler._schedulers": "attribute",
            "LRScheduler._last_lr": "attribute",
            "SequentialLR._schedulers": "attribute",
        },
    },
    "torch_unpickler": {
        "torch": {"_utils": "value", "_weights_only_unpickler": "value"},
        "torch._utils": {
            "_rebuild_parameter": "(data, ...)",
            "_rebuild_parameter_with_state": "(data, ...)",
            "_rebuild_qtensor": "(storage, ...)",
            "_rebuild_sparse_tensor": "(layout, ...)",
            "_rebuild_tensor_v2": "(storage, ...)",
            "_rebuild_tensor_v3": "(storage, ...)",
        },
        "torch._weights_only_unpickler": {"_get_allowed_globals": "value"},
        "torch.serialization": {"_get_layout": "(name)"},
    },
    "torch_compile": {
        "torch._dynamo.config": {"recompile_limit": "value"},
        "torch._dynamo.pgo": {
            "FrameStateSizeEntry.is_size_dynamic": "(self, dim)",
            "FrameStateSizeEntry.is_stride_dynamic": "(self, dim)",
        },
        "torch._inductor.config": {"deterministic": "value"},
    },
    "jsonargparse_types": {
        "jsonargparse._typehints": {"sort_subtypes_for_union": "(subtypes, ...)"},
        "jsonargparse": {
            "ArgumentParser.instantiate": "(self, namespace, ...)",
            "ArgumentParser.instantiate.component": "local",
        },
    },
    "jsonargparse_errors": {
        "jsonargparse._typehints": {
            "NestedArg": "class",
            "NestedArg.key": "value",
            "NestedArg.val": "value",
        }
    },
    "random_generators": {
        "numpy.random.bit_generator": {"randbits": "value"},
        "random": {"Random.seed": "(self, a, ...)"},
    },
}

WORDING: dict[str, dict[str, list[str]]] = {
    "jsonargparse_errors": {
        "jsonargparse._actions": ["print_config", 'Parser key "', "Unable to load config "],
        "jsonargparse._core": [
            'Parser key "',
            "Group '",
            "' does not accept option '",
            "Option '",
            "' is not accepted",
            "the following arguments are required: ",
            "unrecognized arguments: ",
        ],
        "jsonargparse._typehints": [
            'Parser key "',
            "Subtypes: ",
            "Given value: ",
            "Got value: ",
            "Expected ",
            "given class_path ",
            "Import path ",
            "correspond",
        ],
    },
}
"""What a module here reads out of other packages' texts, by the module whose source has it."""
