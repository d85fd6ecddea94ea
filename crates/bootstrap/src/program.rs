//! Which program a rank is: ranks whose windows would mean different things do not meet.

use serde::{Deserialize, Serialize};

/// What must be the same whatever the job is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Program {
    /// Cells and headers are words of the machine.
    pub(crate) byte_order: String,
    pub(crate) crate_version: String,
    /// A hash of the protocol's sources, for builds between two versions.
    pub(crate) sources: String,
}

impl Program {
    /// This one.
    pub(crate) fn this() -> Self {
        Self {
            byte_order: if cfg!(target_endian = "little") { "little-endian" } else { "big-endian" }.to_owned(),
            crate_version: env!("CARGO_PKG_VERSION").to_owned(),
            sources: env!("EP_SOURCES").to_owned(),
        }
    }

    /// The first thing in which `theirs` differs, and both values.
    pub(crate) fn differs(&self, theirs: &Self) -> Option<(&'static str, [String; 2])> {
        let fields = [
            ("byte order", &self.byte_order, &theirs.byte_order),
            ("crate version", &self.crate_version, &theirs.crate_version),
            ("build (hash of the protocol's sources)", &self.sources, &theirs.sources),
        ];
        let differs = fields.into_iter().find(|(_, mine, other)| mine != other);
        differs.map(|(name, mine, other)| (name, [mine.clone(), other.clone()]))
    }
}
