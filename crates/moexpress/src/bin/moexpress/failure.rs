//! Why the command line gives up, and with which exit code.

use std::fmt;

#[cfg(any(feature = "host", feature = "cuda", feature = "ascend"))]
use ep_core::Error;

/// Failed or not verified.
pub(crate) const FAILED: u8 = 1;
/// Bad arguments or input.
pub(crate) const BAD_INPUT: u8 = 2;

/// A message for stderr, what there is to print on stdout all the same, and the exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) text: String,
    pub(crate) report: String,
    pub(crate) code: u8,
}

impl Failure {
    /// Arguments or input that cannot be used.
    pub(crate) fn bad_input(text: impl fmt::Display) -> Self {
        Self { text: text.to_string(), report: String::new(), code: BAD_INPUT }
    }

    /// A run that failed or was not verified.
    pub(crate) fn failed(text: impl fmt::Display) -> Self {
        Self { text: text.to_string(), report: String::new(), code: FAILED }
    }

    /// A rank that did not come together with the others: bad input is what it was given, all else a run that failed.
    #[cfg(any(feature = "host", feature = "cuda", feature = "ascend"))] // The simulator's ranks do not meet.
    pub(crate) fn of_join(error: &Error) -> Self {
        match error {
            Error::Invalid { .. } | Error::Unsupported { .. } => Self::bad_input(error),
            _ => Self::failed(error),
        }
    }

    /// Whether the arguments or the input are to blame.
    pub(crate) const fn is_bad_input(&self) -> bool {
        self.code == BAD_INPUT
    }

    /// With something to print on stdout.
    pub(crate) fn with_report(self, report: String) -> Self {
        Self { report, ..self }
    }
}
