"""The doors: the parts of neuclip that tests may use, modules with all their public names or single names. A test that
uses anything else depends on how the code is written and would hold up the next rewrite. test_layers.py checks it.
"""

DOORS = """
# what users import, type and read
api
cli.main.main
errors
neuclip
report.run_report.write_report
runs.doctor.examine
settings.paper
settings.reading.read_settings
settings.reading.shipped_recipes
settings.writing.settings_as_yaml

# tables and types by which a contributor adds something
cli.command.Count
cli.command.Share
cli.main.COMMANDS
data.open.KINDS
data.open.Kind
data.open.OpenOptions
data.source
objectives.OBJECTIVES
objectives.build_objective
objectives.objective
settings.objectives
settings.options.option

# what the folders call of each other
data.convert.convert
data.decoding.FastDecode
data.decoding.decode
data.loader.Batches
data.mixture
data.open.open_source
data.order.Order
data.order.ShardOrder
files
models.build.build_model
models.export.export_model
plan
records
runs.folder.checkpoints_in
runs.folder.load_checkpoint
runs.folder.samples_at
search.index.Folder
search.index.Searcher
search.server.Page
tasks
training.loop
training.optimizer

# experiments
experiments.convergence
experiments.definition
experiments.gradient
experiments.page
experiments.paper_scale
experiments.perform
experiments.records
experiments.runner

# pure functions of mathematics and text
evaluation.classification
evaluation.normalizer_error
evaluation.retrieval
formatting
objectives.formulas
report.page
report.terminal
secrets

# sizes that a test makes small
data.decoding.MOST_PIXELS
data.decoding.STRIP_PIXELS
data.locations.MOST_NAMES
distributed.collectives.PATIENCE
distributed.collectives.STEP_TIMEOUT
distributed.ranks.ANSWER_SECONDS
distributed.ranks.START_SECONDS
evaluation.embedding.MOST_KNOWN
evaluation.embedding.SORTED_TOGETHER
models.build.LONG_WORD
objectives.mlp.ROWS
objectives.pairs.KEPT
objectives.pairs.STRIP
search.index.BATCH
search.index.SAVE_SECONDS
search.server.LARGEST_UPLOAD
training.stored_features.BLOCK

# inside: still needed today; the list only shrinks
data.by_name.built_folder
data.decoding.simplejpeg
data.evaluation_sets.get_sets
data.faults.FaultLog
data.faults.refuse_bad_source
data.features.Block
data.features.FeatureStore
data.held_out.HeldOutSets
data.held_out.held_out_addresses
data.held_out.named
data.held_out.open_retrieval
data.loader.Batch
data.loader.read_images
data.locations.PROTOCOLS
data.open.data_name
data.open.open_training_data
data.order.augmentation_seeds
data.tar.remote.Limits
data.task_sets.DEFAULT_TEMPLATES
data.task_sets.ZeroShotTask
data.task_sets.read_puzzles
distributed.collectives.any_rank
distributed.collectives.rank
distributed.collectives.sum_over_ranks
distributed.collectives.world_size
distributed.ranks.StopRequest
distributed.ranks.on_main_rank
distributed.ranks.process_group
distributed.ranks.stop_requests
evaluation.embedding.EmbeddedPairs
evaluation.embedding.Embedder
evaluation.gallery.gallery
evaluation.gallery.thumbnail
evaluation.held_out.Evaluation
evaluation.held_out.evaluate_held_out
evaluation.tasks.best_candidates
evaluation.tasks.chance_of
evaluation.tasks.classification_metrics
evaluation.tasks.guessed_jaccard
evaluation.tasks.jaccard
machine.choose_device
machine.choose_precision
machine.set_threads
models.build.BuiltModel
models.build.construct
models.config.SHIPPED
models.config.find_model
models.export.largest_difference
models.export.write_format
models.export.write_text_files
models.modes.apply_modes
models.open_clip_module
models.towers.Towers
models.transforms.fast_crop
models.transforms.normalize_batch
models.weights.IMAGE_PACKAGE
models.weights.PAIR
models.weights.TEXT_PACKAGE
models.weights.packaged_file
objectives.table.TableObjective
runs.build.absolute_address
runs.build.build_objective
runs.build.build_run
runs.build.open_training_source
runs.build.resolve
runs.export.interpolate
runs.export.public
runs.folder.write_settings
runs.load.build_towers
runs.load.open_target
settings.reading.may_change_at_resume
settings.sections.EvaluationSettings
settings.sections.ModelSettings
settings.sections.OptimizerSettings
settings.sections.Settings
settings.sections.TemperatureSettings
settings.sections.TrainSettings
training.observer.full_caption_test
training.run.Run
training.stored_features._compute
training.stored_features.store_features
"""
