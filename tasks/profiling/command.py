"""`python -m tasks.TASK profile`: parameters, FLOP, memory and time of a network."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from datamodules.utils.progress import progress_bar
from modules.models.swin import SwinConfig
from modules.position import POSITIONS
from modules.schema import from_dict
from modules.windows import RELATIVE_BIASES
from tasks.checkpoints.reading import KEY, checkpoint_errors, load_config, read_checkpoint
from tasks.cli.config_files import read_config
from tasks.cli.help_screens import choices_of
from tasks.errors import UsageError, unknown_name, usage_errors
from tasks.inference import DeviceName
from tasks.options import Options, merge_options
from tasks.profiling import counting
from tasks.profiling.files import write_profile
from tasks.profiling.formulas import Part
from tasks.profiling.networks import DEFAULTS, NETWORKS, Network, check_length, main_stacks, resized
from tasks.profiling.parts import kv_cache_values
from tasks.profiling.report import Profile, print_profile, used
from tasks.profiling.timing import AXES, BYTES_PER_PARAMETER, Point, measure
from tasks.training.throughput import matmul_peak

MAX_SIZE = 2**31
# Families of variants whose names the types of their options do not list.
UNLISTED: dict[str, Mapping[str, Any]] = {"position": POSITIONS, "relative_bias": RELATIVE_BIASES}
VOCABULARIES = ("vocabulary", "source_vocabulary", "target_vocabulary")  # options of networks
IMAGE_TASKS = ("vit", "mae", "igpt")  # whose sizes are those of their images


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Parameters, FLOP, memory and time of a network, by part and by size.

    Without preset, config or ckpt_path it is the network that `fit` trains without options. Options
    `--model.net.*` of `fit` replace those of the network. Each list varies one size; the others
    stay at the first length, the first batch size, and the width and depth of the network.

    Args:
        preset: Name of a preset, also of one that is too large to build.
        config: Config file of `fit`; may be given several times, and later ones override earlier
            ones. `--model.net.*` of `fit` replace their options.
        ckpt_path: Checkpoint that `fit` wrote, or its run folder; only its sizes are used.
        lengths: Tokens of a sample, or for vit and mae the side of an image in pixels, with commas
            between them; null: `data.max_length` of a config or checkpoint, else the context, and
            a half, a quarter and an eighth of it.
        widths: Widths d to measure; heads keep their size. null: that of the network.
        depths: Numbers of blocks. null: that of the network.
        batch_sizes: Samples of a batch. null: 1.
        vocabulary: Tokens of a network whose vocabulary comes from data; null: those of the
            published models.
        repetitions: Measurements of each size, in turns; their median counts.
        max_minutes: Largest estimated time of the measurements; times are left out if they would
            take longer.
        device: Where to measure times; auto: on a GPU if there is one.
        output: Folder for profile.json, profile.csv and profile.png; null: none.
    """

    preset: str | None = None
    config: list[str] = field(default_factory=list)
    ckpt_path: str | None = None
    lengths: str | None = None
    widths: str | None = None
    depths: str | None = None
    batch_sizes: str | None = None
    vocabulary: int | None = None
    repetitions: int = 3
    max_minutes: float = 10.0
    device: DeviceName = "auto"
    output: str | None = None


def profile_vit(options: ProfileOptions, net: Options) -> None:
    """Print parameters, FLOP, memory and time of a Vision Transformer, by part and by size."""
    profile("vit", options, net)


def profile_mae(options: ProfileOptions, net: Options) -> None:
    """Print parameters, FLOP, memory and time of a masked autoencoder, by part and by size."""
    profile("mae", options, net)


def profile_bert(options: ProfileOptions, net: Options) -> None:
    """Print parameters, FLOP, memory and time of a text classifier, by part and by size."""
    profile("bert", options, net)


def profile_mlm(options: ProfileOptions, net: Options) -> None:
    """Print parameters, FLOP, memory and time of a masked language model, by part and by size."""
    profile("mlm", options, net)


def profile_lm(options: ProfileOptions, net: Options) -> None:
    """Print parameters, FLOP, memory and time of a language model, by part and by size."""
    profile("lm", options, net)


def profile_igpt(options: ProfileOptions, net: Options) -> None:
    """Print parameters, FLOP, memory and time of an image GPT, by part and by size."""
    profile("igpt", options, net)


def profile_seq2seq(options: ProfileOptions, net: Options) -> None:
    """Print parameters, FLOP, memory and time of an encoder-decoder, by part and by size."""
    profile("seq2seq", options, net)


def profile(task: str, options: ProfileOptions, net: Options) -> None:
    """Profiles a network of a task, in which the options `net` replace its own."""
    for name in ("repetitions", "max_minutes", "vocabulary"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name} {value} must be above 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no GPU that torch can use; leave it out")
    network = NETWORKS[task]
    name, config, of_data = chosen_config(task, options)
    if net:
        with usage_errors():
            changed = merge_options(asdict(config), net)
            config = from_dict(network.kind(changed), changed, "--model.net.")
    lengths = sizes(options.lengths, "lengths") or default_lengths(task, config, of_data)
    vocabulary = options.vocabulary or DEFAULTS.get(task, (0, 0))[0]
    assumed = assumed_sizes(task, config, options, of_data)
    with usage_errors(f"--lengths {max(lengths)}"):
        config = network.fill(config, vocabulary, max(lengths))
    of_network = [getattr(config, field, None) for field in VOCABULARIES]
    if options.vocabulary is not None and options.vocabulary not in of_network:
        known = next(filter(None, of_network), None)
        reason = "does not read tokens" if known is None else f"has a vocabulary of {known}"
        raise UsageError(f"--vocabulary {options.vocabulary}: {name} {reason}; leave it out")
    points = all_points(network, config, lengths, options)
    if options.output is not None:  # before anything is measured
        Path(options.output).mkdir(parents=True, exist_ok=True)
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    found = count(network, name, config, lengths[0], device)
    if found.without_formula or not found.has_flops:
        for point in points:
            counting.count_point(network, point)
    with progress_bar("counting memory", len(points), least=2) as advance:
        for point in points:
            point.activations = counting.saved_bytes(
                network, point.config, point.batch, point.length, torch.float32, device
            )
            advance(1)
    found.points.extend(points)
    found.assumed = [name for name in assumed if name in dict(used(found))]
    found.no_times = why_not_measured(points, options, device)
    if not found.no_times:
        with progress_bar("measuring", len(points) * (options.repetitions + 1)) as advance:
            measure(network, points, options.repetitions, device, advance)
    print_profile(found)
    if options.output is not None:
        write_profile(found, Path(options.output))


def sizes(text: str | None, option: str) -> list[int]:
    """Sizes with commas between them, such as "128,256"; none of None."""
    if text is None:
        return []
    try:
        values = [int(word) for word in text.strip("[]").split(",")]
    except ValueError as error:
        raise UsageError(
            f"--{option} {text}: give whole numbers with commas between them, as in 128,256"
        ) from error
    wrong = [value for value in values if not 1 <= value <= MAX_SIZE]
    if wrong:
        raise UsageError(f"--{option} {wrong[0]}: a size must be at least 1, and below 2^31")
    return list(dict.fromkeys(values))


def chosen_config(task: str, options: ProfileOptions) -> tuple[str, Any, int | None]:
    """Name and config of the network that the options ask for, and `max_length` of its data."""
    network = NETWORKS[task]
    given = [name for name in ("preset", "config", "ckpt_path") if getattr(options, name)]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} both name a network: leave one out")
    if options.preset is not None:
        return options.preset, preset(network, options.preset), None
    if options.ckpt_path is not None:
        entry = read_checkpoint(options.ckpt_path, task)[KEY]
        with checkpoint_errors(f"--ckpt_path {options.ckpt_path}"):
            kind = network.kind(entry["net"])
        config = load_config(kind, entry["net"])
        return options.ckpt_path, config, entry["metadata"].get("max_length")
    files = options.config or [import_module(f"tasks.{task}.__main__").APP.default_config]
    content: Options = reduce(merge_options, map(read_config, files), {})
    title = " ".join(files)
    name = content.get("preset")
    name = name or {"vit": "tiny", "seq2seq": "tiny", "mae": "base"}.get(task)  # as their `net`
    own = content.get("model", {}).get("net") or {}
    with usage_errors(f"--config {title}"):
        base = preset(network, name) if name else network.kind(own)()
        kind = network.kind(asdict(base) | own)
        if not isinstance(base, kind):  # a preset of another architecture
            base = kind()
        net = merge_options(asdict(base), own)
        net = with_data(net, content, options.vocabulary)
        length = (content.get("data") or {}).get("max_length")
        return title, from_dict(kind, net, "model.net."), length


def assumed_sizes(task: str, net: Any, options: ProfileOptions, length: int | None) -> list[str]:
    """Symbols of sizes that data decide and that no option, config or checkpoint gives."""
    if options.ckpt_path is not None:
        return []
    names = {"K": "num_classes", "C": "channels"}
    found = [key for key, name in names.items() if getattr(net, name, 0) is None]
    if task not in IMAGE_TASKS:
        found += ["V", "U"] * (options.vocabulary is None)
        found += ["T"] * (options.lengths is None and length is None)
    return found


def with_data(
    net: dict[str, Any], content: Mapping[str, Any], vocabulary: int | None
) -> dict[str, Any]:
    """Options of a network with the sizes that a config file gives for the data.

    `vocabulary` takes the place of that of the file.
    """
    data = content.get("data") or {}
    if data.get("source") == "digits":
        data = {"image_size": 8, "palette_size": 17} | data  # 17 greys
    of_file = (data.get("tokenizer") or {}).get("vocabulary")
    length = data.get("max_length")
    if data.get("palette_size"):
        of_file = data["palette_size"] + 1  # with the token that starts an image
    if data.get("image_size"):
        length = data["image_size"] ** 2
    for name in VOCABULARIES:
        if name in net and net[name] is None:
            net[name] = vocabulary or of_file
    if "max_length" in net and length is not None:
        net["max_length"] = max(length, net["max_length"] or 0)
    return net


def preset(network: Network, name: str) -> Any:
    """The config of a preset."""
    if name not in network.presets:
        raise UsageError(unknown_name(name, network.presets, "preset"))
    return network.presets[name]


def default_lengths(task: str, config: Any, length: int | None) -> list[int]:
    """`length`, else the context of a network, and a half, a quarter and an eighth of it."""
    longest = NETWORKS[task].length(config) or DEFAULTS[task][1]
    with suppress(ValueError):  # the network takes no texts of this length
        check_length(config, length or longest)
        NETWORKS[task].fill(config, DEFAULTS.get(task, (0, 0))[0], length or longest)
        longest = length or longest
    step = getattr(config, "patch_size", 1)
    found = []
    for part in (1, 2, 4, 8):
        size = max(1, longest // step // part) * step
        with suppress(ValueError):  # an image of few patches may have none to be masked
            check_length(config, size)
            found.append(size)
    return list(dict.fromkeys(found))


def all_points(
    network: Network, config: Any, lengths: list[int], options: ProfileOptions
) -> list[Point]:
    """The sizes to profile: the base, and those that differ from it along one axis."""
    batches = sizes(options.batch_sizes, "batch_sizes") or [1]
    widths = sizes(options.widths, "widths")
    depths = sizes(options.depths, "depths")
    chosen: list[tuple[str, int, Any, int, int]] = []
    for length in lengths:
        with usage_errors(f"--lengths {length}"):
            check_length(config, length)
        chosen.append(("length", length, config, batches[0], length))
    for width in widths:
        with usage_errors(f"--widths {width}"):
            chosen.append(("width", width, resized(config, width), batches[0], lengths[0]))
    for depth in depths:
        with usage_errors(f"--depths {depth}"):
            chosen.append(("depth", depth, resized(config, depth=depth), batches[0], lengths[0]))
    for batch in batches if len(batches) > 1 else []:
        chosen.append(("batch_size", batch, config, batch, lengths[0]))
    points = []
    for axis, value, net, batch, length in sorted(
        chosen, key=lambda one: (AXES.index(one[0]), one[1])
    ):
        filled = network.fill(net, 0, length)
        parts, symbols = network.parts(filled, length)
        flops = (
            batch * sum(part.forward_flops(symbols) for part in parts),
            batch * sum(part.training_flops(symbols) for part in parts),
        )
        parameters = sum(part.parameter_count(symbols) for part in parts)
        points.append(Point(axis, value, filled, batch, length, symbols["T"], parameters, flops))
    return points


def count(network: Network, name: str, config: Any, length: int, device: str) -> Profile:
    """What is counted without measuring: parameters, FLOP and memory for one sample."""
    config = network.fill(config, 0, length)
    parts, symbols = network.parts(config, length)
    with usage_errors():
        net = counting.on_meta(network, config)
    counted = counting.parameters_by_part(net, config)
    known = [part.name for part in parts]
    parts = parts + [Part(name) for name in counted if name not in known]
    activations = {
        dtype: counting.saved_bytes(network, config, 1, length, kind, device)
        for dtype, kind in counting.DTYPES.items()
    }
    is_decoder = hasattr(net, "make_cache")
    return Profile(
        name=name,
        parts=parts,
        sizes=symbols,
        counted_parameters=counted,
        counted_flops=counting.counted_flops(network, config, 1, length),
        activations=activations,
        kv_values=kv_cache_values(config) if is_decoder else None,
        device=device,
        variants=variants_without_formula(config),
        hidden=hidden_widths(config),
    )


def hidden_widths(config: Any) -> list[int]:
    """Of the feed-forward parts; none of a Swin, which has others in each stage."""
    if isinstance(config, SwinConfig):
        return []
    return list(dict.fromkeys(s.resolved.mlp_width for s in main_stacks(config).values()))


def variants_without_formula(config: Any, prefix: str = "") -> list[str]:
    """Options in a config that no formula covers, such as 'stack.norm "mine"'.

    These are variants of the user's own, and `checkpoint_activations`. `init` is not among them,
    since it changes neither parameters nor FLOP.
    """
    found = []
    for name, annotation in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value):
            found += variants_without_formula(value, f"{prefix}{name}.")
        elif name == "checkpoint_activations":  # whose recomputation has no formula
            found += [f"{prefix}{name} true"] * value
        elif name in UNLISTED:
            is_own = not UNLISTED[name][value].__module__.startswith("modules.")
            found += [f'{prefix}{name} "{value}"'] * is_own
        elif (
            name != "init"
            and str in get_args(annotation)
            and value not in (choices_of(annotation) or [value])
        ):
            found.append(f'{prefix}{name} "{value}"')
    return found


def why_not_measured(points: list[Point], options: ProfileOptions, device: str) -> str:
    """A sentence that says why there are no times; empty if they can be measured."""
    nets = {repr(point.config): point.parameters for point in points}
    needed = BYTES_PER_PARAMETER * sum(nets.values())
    needed += max(point.activations or 0 for point in points)
    available = available_memory(device)
    if needed > available:
        return (
            f"Times are left out: weights, gradients, moments and activations would take about "
            f"{needed / 2**30:,.1f} GiB, and {available / 2**30:,.1f} GiB are free."
        )
    peak = matmul_peak(torch.device(device), "32-true")
    total = sum(2 * point.flops[0] + point.flops[1] for point in points)
    minutes = 2 * total * (options.repetitions + 1) / peak / 60
    if minutes > options.max_minutes:
        from tasks.tracking.progress import duration

        return (
            f"Times are left out: they would take about {duration(60 * minutes)}; give shorter "
            "--lengths, or a larger --max_minutes."
        )
    return ""


def available_memory(device: str) -> int:
    """Bytes that a device can still allocate."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info()[0])
    with suppress(OSError, LookupError):  # Linux: with the cache of files, which makes room
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024  # "21698000 kB"
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
