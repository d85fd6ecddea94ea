//! The arguments of `moexpress bench`.

use clap::Args;
use ep_core::Error;

use super::{Backend, Far, FarArgs, FarLanesArg, HtmlArgs, Mode, name_of};

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchArgs {
    /// What is measured
    #[arg(long, value_enum)]
    pub(crate) backend: Backend,
    /// Measures one kind of operation only
    #[arg(long, value_enum)]
    pub(crate) mode: Option<Mode>,
    /// Ranks [default: the GPUs, or with --backend host as many as there are cores, or less so that each has as many experts]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ranks: Option<u32>,
    /// Tokens of each rank, throughput [default: 4096]
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<Vec<u32>>,
    /// Tokens of each rank, low latency [default: 1,128]
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    low_latency_tokens: Option<Vec<u32>>,
    /// With --backend cuda: multiprocessors of each rank, throughput [default: 8,12,16,24]; low latency uses all, but for --nodes, where 0 is all
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', value_parser = clap::value_parser!(u32))]
    multiprocessors: Option<Vec<u32>>,
    /// With --backend cuda --mode throughput: this process is one rank of those that moexpress launch, torchrun, srun or mpirun started, as
    /// those of users are; rank 0 reports
    #[arg(long)]
    pub(crate) processes: bool,
    /// With --backend cuda, a --mode and --far: nodes that the ranks are dealt out to, which share this host's GPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) nodes: u32,
    #[command(flatten)]
    pub(crate) far: FarArgs,
    /// With --nodes: queues to a rail peer [default: per-role; rows-with-credit with --far roce]
    #[arg(long, value_enum, value_name = "QUEUES")]
    pub(crate) far_lanes: Option<FarLanesArg>,
    /// With --nodes: rings from each rank to each other [default: chosen for the shape]
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    channels: Option<Vec<u32>>,
    /// With --nodes: rows that fit a ring [default: chosen for the shape]
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) slots: Option<u32>,
    /// Elements of a token's row
    #[arg(long, value_name = "N", default_value_t = 7168)]
    pub(crate) hidden: u32,
    /// Experts in all
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) experts: u32,
    /// Experts per token
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) topk: u32,
    /// Repetitions, of which the median is told
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) repetitions: u32,
    #[command(flatten)]
    pub(crate) html: HtmlArgs,
    /// Prints a JSON array with an object for each row instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

impl BenchArgs {
    /// Tokens of each rank, throughput.
    #[cfg(any(feature = "cuda", feature = "host"))]
    pub(crate) fn tokens(&self) -> &[u32] {
        self.tokens.as_deref().unwrap_or(&[4096])
    }

    /// Tokens of each rank, low latency.
    #[cfg(any(feature = "cuda", feature = "host"))]
    pub(crate) fn low_latency_tokens(&self) -> &[u32] {
        self.low_latency_tokens.as_deref().unwrap_or(&[1, 128])
    }

    /// Multiprocessors of each rank, throughput.
    #[cfg(feature = "cuda")]
    pub(crate) fn multiprocessors(&self) -> &[u32] {
        self.multiprocessors.as_deref().unwrap_or(&[8, 12, 16, 24])
    }

    /// Multiprocessors of each rank, low latency over several nodes; 0: all.
    #[cfg(feature = "cuda")]
    pub(crate) fn low_multiprocessors(&self) -> &[u32] {
        self.multiprocessors.as_deref().unwrap_or(&[0])
    }

    /// Rings between ranks of several nodes, one number after the other; none: as chosen for the shape.
    #[cfg(feature = "cuda")]
    pub(crate) fn channels(&self) -> Vec<Option<u32>> {
        self.channels.as_ref().map_or_else(|| vec![None], |all| all.iter().copied().map(Some).collect())
    }

    /// Refuses options that nothing would heed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let refused = |with: &str, value: String, allowed| Err(Error::invalid(with, value, allowed));
        self.check_nodes()?;
        let multiprocessors = self.multiprocessors.is_some();
        let none = self.multiprocessors.as_ref().is_some_and(|all| all.contains(&0));
        if none && (self.nodes == 1 || self.mode != Some(Mode::LowLatency)) {
            return refused("--multiprocessors", "0".to_owned(), "1 or more, but for low latency over --nodes");
        }
        if self.backend != Backend::Cuda && multiprocessors {
            return refused("--backend with --multiprocessors", name_of(self.backend), "cuda");
        }
        if self.backend != Backend::Cuda && self.processes {
            return refused("--backend with --processes", name_of(self.backend), "cuda");
        }
        if self.processes && self.mode != Some(Mode::Throughput) {
            let mode = self.mode.map_or_else(|| "not given".to_owned(), name_of);
            return refused("--mode with --processes", mode, "throughput");
        }
        if self.processes && self.ranks.is_some() {
            return refused("--ranks with --processes", "given".to_owned(), "none: they are as many as processes");
        }
        match self.mode {
            Some(Mode::LowLatency) if self.tokens.is_some() => {
                refused("--mode with --tokens", name_of(Mode::LowLatency), "throughput")
            }
            Some(Mode::LowLatency) if multiprocessors && self.nodes == 1 => {
                refused("--mode with --multiprocessors", name_of(Mode::LowLatency), "throughput")
            }
            Some(Mode::Throughput) if self.low_latency_tokens.is_some() => {
                refused("--mode with --low-latency-tokens", name_of(Mode::Throughput), "low-latency")
            }
            _ => Ok(()),
        }
    }
}

impl BenchArgs {
    /// Of several nodes: what is measured, and what belongs to them alone.
    fn check_nodes(&self) -> Result<(), Error> {
        let refused = |with: &str, value: String, allowed: &str| Err(Error::invalid(with, value, allowed));
        if self.nodes == 1 {
            let given = [
                ("--far", self.far.far.is_some()),
                ("--far-lanes", self.far_lanes.is_some()),
                ("--channels", self.channels.is_some()),
                ("--slots", self.slots.is_some()),
            ];
            return match given.into_iter().find(|(_, given)| *given) {
                Some((option, _)) => refused(&format!("--nodes with {option}"), "1".to_owned(), "2 or more"),
                None => Ok(()),
            };
        }
        if self.backend != Backend::Cuda {
            return refused("--backend with --nodes", name_of(self.backend), "cuda");
        }
        if !matches!(self.far.far, Some(Far::Loop | Far::Ibgda)) {
            let far = self.far.far.map_or_else(|| "not given".to_owned(), name_of);
            return refused(
                "--far with --nodes",
                far,
                "loop, or ibgda with --far-devices gpu: between hosts, time your own job",
            );
        }
        if let Some((option, _)) = self.far.misplaced() {
            return refused(
                "--far",
                self.far.far.map_or_else(String::new, name_of),
                &format!("one that heeds {option}"),
            );
        }
        if self.mode.is_none() || self.processes {
            let mode = self.mode.map_or_else(|| "not given".to_owned(), name_of);
            return refused("--mode with --nodes", mode, "throughput or low-latency, without --processes");
        }
        if self.mode == Some(Mode::LowLatency) {
            let rings = [("--channels", self.channels.is_some()), ("--slots", self.slots.is_some())];
            if let Some((option, _)) = rings.into_iter().find(|(_, given)| *given) {
                return refused(&format!("--mode with {option}"), name_of(Mode::LowLatency), "throughput");
            }
        }
        if self.ranks.is_some_and(|ranks| !ranks.is_multiple_of(self.nodes)) {
            return refused(
                "--ranks",
                self.ranks.unwrap_or(0).to_string(),
                &format!("a multiple of {} nodes", self.nodes),
            );
        }
        Ok(())
    }
}
