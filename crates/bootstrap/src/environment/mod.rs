//! What a launcher tells a process about its place among the others.

mod error;
mod hostlist;
mod mpi;
mod slurm;
mod torchrun;

pub use error::EnvironmentError;

use std::fmt;
use std::str::FromStr;

use ep_core::{Rank, Topology};

/// The program that started the processes, as its variables show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Launcher {
    /// `torchrun`, or anything that sets its variables, as `moexpress launch` does.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Hydra (MPICH, Intel MPI, MVAPICH), by PMI variables.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "MPICH/PMI",
            Self::Slurm => "Slurm",
        })
    }
}

/// Where this process is among the others, and where they meet.
///
/// Ranks are placed in blocks: the first `local_world` ranks on the first node, the next on the second, and so on, the
/// same number on every node. Other placements are refused, since [`Topology`] cannot express them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Environment {
    /// Who started the process.
    pub launcher: Launcher,
    /// This process.
    pub rank: Rank,
    /// Processes in all.
    pub world: u32,
    /// Index of this process on its node.
    pub local_rank: u32,
    /// Processes on each node.
    pub local_world: u32,
    /// Name or address of the host of rank 0.
    pub master_address: String,
    /// Port of the meeting place there.
    pub master_port: u16,
    /// Where the meeting place is, `host:port`, when a process holds it that is no rank ([`MEETING_VARIABLE`]).
    pub meeting_place: Option<String>,
}

/// The variable by which a launcher says where it holds the meeting place, `host:port`, so that it is not in rank 0's process. It
/// goes before `MASTER_ADDR` and `MASTER_PORT`, which other libraries use, too.
pub const MEETING_VARIABLE: &str = "MOEXPRESS_MEETING";

impl Environment {
    /// Reads the variables of this process.
    ///
    /// # Errors
    /// [`EnvironmentError`], which names variable, value and what was expected.
    pub fn detect() -> Result<Self, EnvironmentError> {
        Self::detect_from(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Reads variables through `lookup`, which gives the value of a name.
    ///
    /// The first launcher that shows is taken: torchrun (`RANK`), Open MPI (`OMPI_COMM_WORLD_RANK`), PMI (`PMI_RANK`),
    /// Slurm (`SLURM_PROCID`). Slurm is last because `mpirun` and `torchrun` are often started inside one of its jobs. Where Slurm speaks PMI-2 to its
    /// tasks (`srun --mpi=pmi2`), it is Slurm that is read: of PMI alone they have no number on their host.
    ///
    /// # Errors
    /// [`EnvironmentError`], which names variable, value and what was expected.
    pub fn detect_from(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, EnvironmentError> {
        let variables = Variables { lookup: &lookup };
        let mut environment = if variables.has("RANK") {
            torchrun::detect(&variables)?
        } else if variables.has("OMPI_COMM_WORLD_RANK") {
            mpi::detect(&variables, &mpi::OPEN_MPI)?
        } else if variables.has("PMI_RANK") && (variables.has("MPI_LOCALRANKID") || !variables.has("SLURM_PROCID")) {
            mpi::detect(&variables, &mpi::PMI)?
        } else if variables.has("SLURM_PROCID") {
            slurm::detect(&variables)?
        } else {
            return Err(EnvironmentError::NotLaunched);
        };
        variables.agrees("WORLD_SIZE", environment.world)?;
        environment.meeting_place = variables.meeting_place()?;
        Ok(environment)
    }

    /// The meeting place, as [`crate::Settings`] takes it: `host:port`, an IPv6 address in brackets.
    pub fn address(&self) -> String {
        if let Some(address) = &self.meeting_place {
            return address.clone();
        }
        let Self { master_address: host, master_port: port, .. } = self;
        if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Nodes and ranks.
    ///
    /// # Errors
    /// [`ep_core::Error::Invalid`] when there are more ranks than one communicator holds.
    pub fn topology(&self) -> Result<Topology, ep_core::Error> {
        Topology::new(self.world / self.local_world.max(1), self.local_world)
    }
}

/// The port of a job with such a number: below the range that systems hand out by themselves (32768 on Linux).
const fn job_port(number: u64) -> u16 {
    20_000 + (number % 10_000) as u16
}

/// A number and the variable it was read from, for complaints.
#[derive(Clone, Debug)]
struct Read<T> {
    name: String,
    value: T,
}

/// The four numbers of a place, before they are held against each other.
#[derive(Clone, Debug)]
struct Place {
    rank: Read<u32>,
    world: Read<u32>,
    local_rank: Read<u32>,
    local_world: Read<u32>,
}

impl Place {
    /// Refuses numbers that contradict each other.
    fn check(&self) -> Result<(), EnvironmentError> {
        let Self { rank, world, local_rank, local_world } = self;
        for count in [world, local_world] {
            if count.value == 0 {
                return Err(EnvironmentError::invalid(&count.name, 0, "at least 1"));
            }
        }
        below(rank, world)?;
        below(local_rank, local_world)?;
        if local_world.value > world.value || world.value % local_world.value != 0 {
            return Err(contradiction(world, local_world, "all nodes must have the same number of processes"));
        }
        if rank.value % local_world.value != local_rank.value {
            return Err(contradiction(rank, local_rank, "ranks must be placed in blocks, node after node"));
        }
        Ok(())
    }

    /// Whether all processes are on one node.
    const fn is_one_node(&self) -> bool {
        self.world.value == self.local_world.value
    }

    fn environment(&self, launcher: Launcher, master_address: String, master_port: u16) -> Environment {
        Environment {
            launcher,
            rank: Rank(self.rank.value),
            world: self.world.value,
            local_rank: self.local_rank.value,
            local_world: self.local_world.value,
            master_address,
            master_port,
            meeting_place: None,
        }
    }
}

fn below(index: &Read<u32>, count: &Read<u32>) -> Result<(), EnvironmentError> {
    if index.value < count.value {
        return Ok(());
    }
    Err(contradiction(index, count, "the first must be below the second"))
}

fn contradiction(first: &Read<u32>, second: &Read<u32>, why: &'static str) -> EnvironmentError {
    let names = [first.name.clone(), second.name.clone()];
    EnvironmentError::Contradiction { names, values: [first.value.to_string(), second.value.to_string()], why }
}

/// Typed access to variables. An empty value counts as none: shells export such by accident.
struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn needed_text(&self, name: &str, launcher: Launcher, expected: &'static str) -> Result<String, EnvironmentError> {
        self.text(name).ok_or_else(|| EnvironmentError::Missing { name: name.to_owned(), launcher, expected })
    }

    fn number<T: FromStr>(&self, name: &str, expected: &'static str) -> Result<Option<T>, EnvironmentError> {
        let parse = |value: String| {
            value.parse().map_err(|_| EnvironmentError::invalid(name, format_args!("'{value}'"), expected))
        };
        self.text(name).map(parse).transpose()
    }

    fn needed(&self, name: &str, launcher: Launcher) -> Result<Read<u32>, EnvironmentError> {
        const EXPECTED: &str = "a whole number";
        let missing = || EnvironmentError::Missing { name: name.to_owned(), launcher, expected: EXPECTED };
        let value = self.number(name, EXPECTED)?.ok_or_else(missing)?;
        Ok(Read { name: name.to_owned(), value })
    }

    /// [`MEETING_VARIABLE`].
    fn meeting_place(&self) -> Result<Option<String>, EnvironmentError> {
        let Some(place) = self.text(MEETING_VARIABLE) else { return Ok(None) };
        let port = place.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        match port {
            Some(1..) => Ok(Some(place)),
            _ => Err(EnvironmentError::invalid(MEETING_VARIABLE, format_args!("'{place}'"), "host:port")),
        }
    }

    /// `MASTER_PORT`, which overrides whatever a launcher would suggest.
    fn port(&self) -> Result<Option<u16>, EnvironmentError> {
        const EXPECTED: &str = "a port, 1 to 65535";
        match self.number("MASTER_PORT", EXPECTED)? {
            Some(0) => Err(EnvironmentError::invalid("MASTER_PORT", 0, EXPECTED)),
            port => Ok(port),
        }
    }

    /// Refuses a variable that is set and says something else than the launcher.
    fn agrees(&self, name: &str, world: u32) -> Result<(), EnvironmentError> {
        match self.number::<u32>(name, "a whole number")? {
            Some(value) if value != world => Err(EnvironmentError::invalid(
                name,
                value,
                format_args!("{world}, which the launcher says, or nothing"),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Detects from `A=1 B=2`.
    pub(crate) fn detect(variables: &str) -> Result<Environment, EnvironmentError> {
        let pairs: Vec<(&str, &str)> = variables.split(' ').filter_map(|pair| pair.split_once('=')).collect();
        Environment::detect_from(|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    /// Rank, world, local rank, local world, and `host:port`.
    pub(crate) fn place(environment: &Environment) -> (u32, u32, u32, u32, String) {
        let Environment { rank, world, local_rank, local_world, .. } = environment;
        (rank.0, *world, *local_rank, *local_world, environment.address())
    }

    #[test]
    fn without_a_launcher_it_says_what_was_looked_for() {
        let text = detect("WORLD_SIZE=3").unwrap_err().to_string();
        assert!(["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"].iter().all(|name| text.contains(name)));
    }

    #[test]
    fn launchers_inside_a_slurm_job_come_first() {
        let slurm = "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0";
        let mpi =
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";
        assert_eq!(detect(&format!("{slurm} {mpi}")).unwrap().launcher, Launcher::OpenMpi);
        let torchrun = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1";
        assert_eq!(detect(&format!("{slurm} {mpi} {torchrun}")).unwrap().launcher, Launcher::Torchrun);
        let pmi = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
        assert_eq!(detect(&format!("{slurm} {pmi}")).unwrap().launcher, Launcher::Pmi);
        // As `srun --mpi=pmi2` has it.
        assert_eq!(
            detect(&format!(
                "{slurm} SLURM_NTASKS_PER_NODE=1 SLURM_JOB_NODELIST=a SLURM_JOB_ID=7 PMI_RANK=0 PMI_SIZE=1 PMI_FD=7"
            ))
            .unwrap()
            .launcher,
            Launcher::Slurm
        );
    }

    #[test]
    fn a_held_meeting_place_goes_before_the_port_of_rank_0() {
        let torchrun = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1";
        let held = detect(&format!("{torchrun} MOEXPRESS_MEETING=b:2")).unwrap();
        assert_eq!((held.address().as_str(), held.master_port), ("b:2", 1));
        for wrong in ["b", "b:0", "b:", ":b"] {
            let error = detect(&format!("{torchrun} MOEXPRESS_MEETING={wrong}")).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("host:port"), "{error}");
        }
    }

    #[test]
    fn an_ipv6_address_gets_brackets() {
        let torchrun = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=::1 MASTER_PORT=29500";
        assert_eq!(detect(torchrun).unwrap().address(), "[::1]:29500");
    }
}
