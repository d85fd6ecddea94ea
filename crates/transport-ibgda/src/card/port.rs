//! Which adapter, port and address (GID) a rank uses.

use ep_rdma::{Gid, Port};

use super::Context;
use crate::error::Error;
use crate::library::Library;

/// A port that was chosen, opened.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) context: Context,
    pub(crate) port: Port,
    pub(crate) gid: Gid,
    /// Why this one, in words.
    pub(crate) reason: String,
}

/// Opens an active port for a rank with the local index `local`: of the adapters of these names, or of all where there are none.
pub(crate) fn choose(library: &Library, names: &[String], local: u32) -> Result<Chosen, Error> {
    let found = Context::names(library)?;
    if let Some(name) = names.iter().find(|name| !found.contains(name)) {
        return Err(Error::NoSuchDevice { name: name.clone(), found: found.join(", ") });
    }
    let (asked, mut why) = (!names.is_empty(), Vec::new());
    let mut usable = Vec::new();
    for name in if asked { names } else { &found } {
        match usable_port(library, name) {
            Ok(Ok(found)) => usable.push(found),
            Ok(Err(reason)) => why.push(reason),
            Err(error) => why.push(error.to_string()),
        }
    }
    let count = usable.len();
    let Some((context, port, gid)) = usable.into_iter().nth(local as usize % count.max(1)) else {
        return Err(Error::NoPort { why: why.join("; ") });
    };
    let how = if asked { "asked for" } else { "active" };
    let reason = format!(
        "adapter {}, address {gid} (GID {}): for local rank {local}, among {count} {how}",
        context.name(),
        gid.index
    );
    Ok(Chosen { context, port, gid, reason })
}

/// The port of an adapter with its best address, or what is wrong with it. A card with several ports is as many adapters.
fn usable_port(library: &Library, name: &str) -> Result<Result<(Context, Port, Gid), String>, Error> {
    let context = Context::open(library, name)?;
    let port = context.port(1)?;
    Ok(context.usable(&port).map(|gid| (context, port, gid)))
}
