//! What can be wrong with the variables.

use std::fmt;

use super::Launcher;

/// Variables that do not tell a process its place.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// No launcher shows.
    #[error(
        "no launcher found: none of RANK (torchrun), OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (MPICH/PMI) and \
         SLURM_PROCID (Slurm) is set; start the processes with one of them, or with moexpress launch"
    )]
    NotLaunched,
    /// A variable that the launcher should have set.
    #[error("{name} is not set, expected from {launcher}: {expected}")]
    Missing {
        /// The variable.
        name: String,
        /// The launcher whose other variables are there.
        launcher: Launcher,
        /// What its value would have been.
        expected: &'static str,
    },
    /// A value that means nothing.
    #[error("{name} is {value}, expected: {expected}")]
    Invalid {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// Two variables that cannot both be right.
    #[error("{} is {} and {} is {}: {why}", names[0], values[0], names[1], values[1])]
    Contradiction {
        /// The variables.
        names: [String; 2],
        /// Their values.
        values: [String; 2],
        /// The rule that they break.
        why: &'static str,
    },
}

impl EnvironmentError {
    pub(super) fn invalid(name: &str, value: impl fmt::Display, expected: impl fmt::Display) -> Self {
        Self::Invalid { name: name.to_owned(), value: value.to_string(), expected: expected.to_string() }
    }
}
