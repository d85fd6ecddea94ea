//! MPI launchers: ranks are said, the meeting place is not.

use super::{Environment, EnvironmentError, Launcher, Place, Variables};

/// The names that one launcher uses.
#[derive(Debug)]
pub(super) struct Names {
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
}

pub(super) const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    world: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
};

pub(super) const PMI: Names = Names {
    launcher: Launcher::Pmi,
    rank: "PMI_RANK",
    world: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_world: "MPI_LOCALNRANKS",
};

/// The port that is usual among launchers of training jobs.
const USUAL_PORT: u16 = 29500;

pub(super) fn detect(variables: &Variables<'_>, names: &Names) -> Result<Environment, EnvironmentError> {
    let needed = |name| variables.needed(name, names.launcher);
    let place = Place {
        rank: needed(names.rank)?,
        world: needed(names.world)?,
        local_rank: needed(names.local_rank)?,
        local_world: needed(names.local_world)?,
    };
    place.check()?;
    let address = match variables.text("MASTER_ADDR") {
        None if place.is_one_node() => "127.0.0.1".to_owned(),
        Some(address) => address,
        None => {
            let expected = "the host of rank 0, which the user passes on (mpirun -x MASTER_ADDR=..., mpiexec -genv)";
            return Err(EnvironmentError::Missing {
                name: "MASTER_ADDR".to_owned(),
                launcher: names.launcher,
                expected,
            });
        }
    };
    Ok(place.environment(names.launcher, address, variables.port()?.unwrap_or(USUAL_PORT)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{detect, place};

    const OPEN_MPI: &str =
        "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";
    const PMI: &str = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";

    #[test]
    fn open_mpi_needs_the_host_of_rank_0_when_there_are_several_nodes() {
        let text = detect(OPEN_MPI).unwrap_err().to_string();
        assert!(text.starts_with("MASTER_ADDR is not set, expected from Open MPI") && text.contains("mpirun -x"));
        let environment = detect(&format!("{OPEN_MPI} MASTER_ADDR=head MASTER_PORT=4000")).unwrap();
        assert_eq!(place(&environment), (3, 4, 1, 2, "head:4000".to_owned()));
    }

    #[test]
    fn on_one_node_it_is_the_loopback_address() {
        assert_eq!(place(&detect(PMI).unwrap()), (1, 2, 1, 2, "127.0.0.1:29500".to_owned()));
    }

    #[test]
    fn a_world_size_that_says_something_else_is_refused() {
        let text = detect(&format!("{PMI} WORLD_SIZE=3")).unwrap_err().to_string();
        assert_eq!(text, "WORLD_SIZE is 3, expected: 2, which the launcher says, or nothing");
        assert!(detect(&format!("{PMI} WORLD_SIZE=2")).is_ok());
    }

    #[test]
    fn a_missing_local_rank_is_named() {
        let text = detect("PMI_RANK=1 PMI_SIZE=2").unwrap_err().to_string();
        assert_eq!(text, "MPI_LOCALRANKID is not set, expected from MPICH/PMI: a whole number");
    }
}
