//! What adapters of this machine there are, and whether kernels can post to them.

use crate::card::{Capabilities, Context};
use crate::error::Error;
use crate::library::Library;

/// An adapter that takes commands, and what of it matters to whoever chooses one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Adapter {
    /// Its name.
    pub name: String,
    /// Whether rows may have relaxed ordering: see [`Settings::relaxed_ordering`](crate::Settings::relaxed_ordering).
    pub relaxed_ordering: bool,
}

/// All mlx5 adapters: each opened as lanes would, and asked for what they need; closed again.
///
/// # Errors
/// Where there is none; and of each what it lacks: DEVX, atomics, and others.
pub fn survey(library: &Library) -> Result<Vec<Result<Adapter, Error>>, Error> {
    let look = |name: &String| {
        let capabilities = Capabilities::of(&Context::open(library, name)?)?;
        // Whether a port is of Ethernet is another question, for when one is chosen.
        capabilities.check(name, false)?;
        Ok(Adapter { name: name.clone(), relaxed_ordering: capabilities.relaxed_ordering })
    };
    Ok(Context::names(library)?.iter().map(look).collect())
}
