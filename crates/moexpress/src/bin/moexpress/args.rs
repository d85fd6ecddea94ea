//! The arguments.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ep_conformance::workload::RoutingKind;
use ep_core::layout::Queues;
use ep_core::quant::Scaling;
use ep_core::{Element, Error, Nanos, Shape, Topology};

mod bench;
mod far;
mod html;
mod settings;
mod timed;

pub(crate) use bench::BenchArgs;
pub(crate) use far::{Far, FarArgs};
pub(crate) use html::HtmlArgs;
pub(crate) use settings::SettingsArgs;
pub(crate) use timed::{CompareArgs, ModelName, Part, Published, ThreadsArgs, TuneArgs};

/// Moves tokens to experts and back, and checks every bit of it.
#[derive(Parser, Debug)]
#[command(name = "moexpress", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const JSON_KEYS: &str = "\
Keys of --json, among others:
  verified             whether everything equals the oracle, bit for bit (any NaN equals any NaN); false where payload was
                       elided, although error is null: then rows were compared in verified_values values only
  error                what went wrong, or null
  rows_own|near|far    rows that dispatch and combine moved within a rank, within a node, between nodes; each counted
                       once, at its sender
  bytes_own|near|far   bytes of these rows as they travel: header, payload and padding, without counts and signals
  clock                what times are of: host, or virtual with --schedule timed
  dispatch_ns          host: from the first rank's start of dispatch to the last one's end; virtual, and with --processes:
                       what it took the slowest rank, from its own start on
  combine_ns           likewise; ranks do not wait for each other in between, so the two may overlap
  dispatch_near_gb_s   bytes that a rank sends near in the dispatch, mean of the ranks, by dispatch_ns; likewise
                       dispatch_far_gb_s, combine_near_gb_s, combine_far_gb_s; null without --schedule timed
  events               verbs, deliveries and turns that the simulator let happen; null on other backends
  memory_estimate_bytes, memory_peak_bytes
                       this machine's memory: as estimated before the run, and as taken; the latter null where not told,
                       and with --processes, which have each their own
  traffic              dispatch_rows [from][to], rows that each of the ranks, above 64 of them each node, sent to each
                       null above 64 nodes
  expert_choices       choices that each expert received
  rank_spans_ns        start and end of dispatch and of combine of each rank, from rank_spans_from on
  verified_rows        rows compared, received and combined; likewise _values, _weights, _indices
Measured keys are null when a rank failed.";

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Dispatches a batch, lets the experts work, combines, and checks everything against the scalar oracle.
    ///
    /// Exit codes: 0 verified, or with --elide-payload all that can be compared equals the oracle; 1 failed or not verified,
    /// 2 bad arguments or input.
    #[command(after_long_help = JSON_KEYS)]
    Run(Box<RunArgs>),
    /// Prints the sizes of windows and rings for a layer, and what DeepEP V1 would need for it.
    Plan(PlanArgs),
    /// Proposes settings for a layer on a machine, by timed runs of dispatch and combine with elided payload.
    ///
    /// The same arguments propose the same settings on every machine: nothing is measured on this one.
    Tune(TuneArgs),
    /// Measures a backend beside what its machine could do: one table.
    Bench(BenchArgs),
    /// Holds the timed scheduler against published figures.
    Compare(CompareArgs),
    /// Says what this machine has for moexpress, and what each missing thing prevents. Changes nothing.
    ///
    /// Exit code: 0, whatever is missing.
    Doctor(DoctorArgs),
    /// Prints completions for a shell: moexpress completions bash > ~/.local/share/bash-completion/completions/moexpress
    Completions {
        /// For which shell
        shell: clap_complete::Shell,
    },
    /// Prints the manual page: moexpress man > moexpress.1
    Man,
    /// Starts the processes of a job on this machine, as torchrun does, and ends all when one fails, or lets the others go on.
    ///
    /// Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT, a fresh
    /// MOEXPRESS_SECRET, and with MOEXPRESS_MEETING the meeting place, which this command holds, in its environment, and nothing on
    /// its standard input. Its output is printed line by line, with its rank in front; an error that several processes report, word
    /// for word, once. SIGINT and SIGTERM are passed on.
    ///
    /// What is still there of the job when this command is killed is ended, too. Once all have ended, a line waits for its reader
    /// for 10 minutes, after a signal for 5 s; where something has left its process group and holds the output open, all
    /// lines together for 10 s.
    ///
    /// Exit codes: 0 all succeeded, 2 bad arguments or the command cannot be started; otherwise that of the first process
    /// that failed, 128 + signal if a signal ended it or this command.
    Launch(LaunchArgs),
    /// Part of launch: ends the processes whose numbers it reads when nobody writes any more.
    #[command(hide = true)]
    Guard(GuardArgs),
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Print a JSON array: part, standing (ok, limited or missing), what, seen and prevents of each finding
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct LaunchArgs {
    /// Processes in all
    #[arg(short, long = "processes", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) n: u32,
    /// Nodes that the processes pretend to be on, the same number on each
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) nodes: u32,
    /// MASTER_PORT of the processes [default: one that is free]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) master_port: Option<u16>,
    /// When a process fails, the others go on: those that recover finish what they can. The exit code is that of the first rank
    /// that failed
    #[arg(long)]
    pub(crate) keep_going: bool,
    /// How long processes that are told to end may take before they are killed: 500ms, 10s, ...
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub(crate) grace: Duration,
    /// What each process runs, and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct GuardArgs {
    /// How long processes that are told to end may take before they are killed
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) grace: Duration,
}

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct RunArgs {
    /// What the ranks run on
    #[arg(long, value_enum, default_value_t = Backend::Sim)]
    pub(crate) backend: Backend,
    /// With --backend host, cuda or ascend: this process is one rank of those that moexpress launch, torchrun, srun or mpirun
    /// started; rank 0 reports
    #[arg(long, conflicts_with_all = ["nodes", "ranks_per_node"])]
    pub(crate) processes: bool,
    /// With --backend ascend: on a twin of the NPUs, which runs their very kernels and checks every access; its times say nothing
    #[arg(long)]
    pub(crate) twin: bool,
    /// Kind of operation
    #[arg(long, value_enum, default_value_t = Mode::Throughput)]
    pub(crate) mode: Mode,
    /// With --mode low-latency: what comes back of a token [default: per-choice]
    #[arg(long, value_enum, value_name = "FORM")]
    pub(crate) results: Option<Results>,
    #[command(flatten)]
    pub(crate) topology: TopologyArgs,
    /// Tokens of each rank, or of all ranks one by one: 128 or 128,0,64,...
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', default_value = "128", value_parser = number::<u32>(TOKENS))]
    pub(crate) tokens: Vec<u32>,
    #[command(flatten)]
    pub(crate) layer: LayerArgs,
    /// How tokens choose experts: uniform; grouped:G:L (experts in G groups, a token uses at most L); skewed:A (Zipf with
    /// exponent A); single (expert 0 only)
    #[arg(long, value_name = "KIND", default_value = "uniform")]
    pub(crate) routing: RoutingKind,
    /// Each choice is dropped (-1) with this probability
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = number::<f64>("a number, 0 to 1"))]
    pub(crate) drop: f64,
    /// With --backend sim: order in which things happen [default: explore]
    #[arg(long, value_enum)]
    pub(crate) schedule: Option<Schedule>,
    #[command(flatten)]
    pub(crate) far: FarArgs,
    /// With --backend sim or --far: queues to a rail peer [default: per-role; rows-with-credit with --far roce]
    #[arg(long, value_enum, value_name = "QUEUES")]
    pub(crate) far_lanes: Option<FarLanesArg>,
    /// With --schedule timed: the machine whose time it is [default: h800-cx7]
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) model: Option<ModelName>,
    /// With --schedule timed: rows take the time of their payload but have next to none, so that large batches fit, and with
    /// --mode low-latency thousands of ranks (throughput: hundreds, since each rank holds all others' counts). Rows' values
    /// cannot be verified then
    #[arg(long)]
    pub(crate) elide_payload: bool,
    #[command(flatten)]
    pub(crate) threads: ThreadsArgs,
    /// What batch and schedule are drawn from; the same seed repeats a run of the simulator exactly
    #[arg(long, default_value_t = 0, value_parser = number::<u64>(SEED))]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
    /// Reads the batch from a safetensors file instead: x [tokens, hidden] bf16, f16 or f32; topk_idx [tokens, topk] i64,
    /// -1 = dropped; optional topk_weights f32 of the same shape and rank [tokens] i32
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "hidden", "topk", "routing"])]
    pub(crate) input: Option<PathBuf>,
    /// Writes what each rank had, received and got back into DIR/rank{r}.safetensors
    #[arg(long, value_name = "DIR")]
    pub(crate) dump: Option<PathBuf>,
    /// With --backend sim: writes a trace of all verbs, to be opened in Perfetto
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) html: HtmlArgs,
    /// Prints one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) topology: TopologyArgs,
    /// The most tokens of one rank
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: u32,
    #[command(flatten)]
    pub(crate) layer: LayerArgs,
    /// With room for low latency beside that for throughput
    #[arg(long)]
    pub(crate) low_latency: bool,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
    /// Prints one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct TopologyArgs {
    /// Nodes: rows for other nodes travel once along the rail and are fanned out there
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) nodes: u32,
    /// Ranks of each node
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) ranks_per_node: u32,
}

impl TopologyArgs {
    pub(crate) fn topology(&self) -> Result<Topology, Error> {
        Topology::new(self.nodes, self.ranks_per_node)
    }
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct LayerArgs {
    /// Elements of a token's row
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) hidden: u32,
    /// Experts in all
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) experts: u32,
    /// Experts per token
    #[arg(long, value_name = "N", default_value_t = 6)]
    pub(crate) topk: u32,
    /// How elements travel
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    pub(crate) dtype: Dtype,
}

impl LayerArgs {
    /// The shape for at most `max_tokens` tokens a rank.
    pub(crate) fn shape(&self, max_tokens: u32) -> Result<Shape, Error> {
        let element = match self.dtype {
            Dtype::Bf16 => Element::Bf16,
            Dtype::Fp8 => Element::Fp8(Scaling::Exact),
            Dtype::Fp8Pow2 => Element::Fp8(Scaling::PowerOfTwo),
            Dtype::Fp8Ue8m0 => Element::Fp8(Scaling::Ue8m0),
            Dtype::Int8 => Element::Int8,
        };
        let builder = Shape::builder().experts(self.experts).topk(self.topk).hidden(self.hidden);
        builder.element(element).max_tokens(max_tokens).build()
    }
}

/// Backends of the command line.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backend {
    /// The simulator
    Sim,
    /// CPU ranks of this host over shared memory
    Host,
    /// The NVIDIA GPUs of this host, a rank on each, or several where there are fewer
    Cuda,
    /// The Ascend NPUs of this host, a rank on each, or with --twin their twin on this CPU
    Ascend,
}

/// Kinds of operation.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// Large batches
    Throughput,
    /// Few tokens, fixed slots, sending and receiving apart
    LowLatency,
}

/// What comes back in low latency.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Results {
    /// A row for each choice, which the token's rank weighs
    PerChoice,
    /// A row for each rank, which weighs and sums those of its experts
    PerRank,
}

/// Orders of the simulator.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Schedule {
    /// A seeded adversary
    Explore,
    /// Virtual time on a model of links and cores, always the same
    Timed,
}

/// Which lanes from a rank to another of its rail share a queue. Those of low latency never do.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FarLanesArg {
    /// Every lane has a queue of its own, posted to by its role
    PerRole,
    /// One queue for rows and one for credit, each posted to by a coordinator
    RowsAndCredit,
    /// One queue for rows and credit, posted to by a coordinator
    RowsWithCredit,
    /// One queue for rows, credit and control, posted to by a coordinator
    One,
}

impl From<FarLanesArg> for Queues {
    fn from(arg: FarLanesArg) -> Self {
        match arg {
            FarLanesArg::PerRole => Self::PER_ROLE,
            FarLanesArg::RowsAndCredit => Self::ROWS_AND_CREDIT,
            FarLanesArg::RowsWithCredit => Self::ROWS_WITH_CREDIT,
            FarLanesArg::One => Self::ONE,
        }
    }
}

/// Element types.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Dtype {
    /// bfloat16
    Bf16,
    /// E4M3 with an f32 scale for every 128 elements; results come back as bf16
    Fp8,
    /// The same with scales rounded up to powers of two
    Fp8Pow2,
    /// The same with scales stored as one exponent byte (UE8M0)
    Fp8Ue8m0,
    /// Signed bytes with an f32 scale for each row; results come back as bf16. Not on GPUs
    Int8,
}

/// The name of a value as the user writes it.
pub(crate) fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// A time that is allowed to be none at all.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let form = "a number and ns, us, ms, s or min, for example 500ms";
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(|| format!("no unit, allowed: {form}"))?;
    let (number, unit) = text.split_at(unit_at);
    let nanos = match unit.trim_start() {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "min" => 60_000_000_000,
        _ => return Err(format!("allowed: {form}")),
    };
    let number: u64 = number.parse().map_err(|_| format!("allowed: {form}"))?;
    match number.checked_mul(nanos) {
        Some(nanos) => Ok(Duration::from_nanos(nanos)),
        None => Err("allowed: less than 585 years".to_owned()),
    }
}

/// What is allowed for tokens of a rank, and for seeds.
const TOKENS: &str = "whole numbers, 0 to 67108864";
const SEED: &str = "a whole number, 0 to 18446744073709551615";

/// Reads a number; what is none is told what is `allowed`.
fn number<T: FromStr>(allowed: &'static str) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| text.parse().map_err(|_| format!("allowed: {allowed}"))
}

/// A time within which something is to come to pass.
fn parse_time(text: &str) -> Result<Nanos, String> {
    match parse_duration(text)?.as_nanos() {
        0 => Err("allowed: more than 0".to_owned()),
        nanos => Ok(Nanos(nanos as u64)),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use ep_core::shape::MAX_TOKENS;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
        assert!(TOKENS.ends_with(&MAX_TOKENS.to_string()) && SEED.ends_with(&u64::MAX.to_string()));
    }

    #[test]
    fn times_need_a_unit() {
        assert_eq!(parse_time("500ms"), Ok(Nanos::from_millis(500)));
        assert_eq!(parse_time("60s"), Ok(Nanos::from_secs(60)));
        assert_eq!(parse_time("2 min"), Ok(Nanos::from_secs(120)));
        assert!(parse_time("60").unwrap_err().contains("500ms"));
        assert!(parse_time("0s").unwrap_err().contains("more than 0"));
        assert_eq!(parse_duration("0s"), Ok(Duration::ZERO));
        assert!(parse_time("99999999999999999999s").is_err() && parse_time("-1s").is_err() && parse_time("").is_err());
    }
}
