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

/// Opens a port for a rank with the local index `local`: of these adapters, in turn, that whose turn it is, or of all there are, in turn, one that can be used.
pub(crate) fn choose(library: &Library, names: &[String], local: u32) -> Result<Chosen, Error> {
    let found = Context::names(library)?;
    if let Some(name) = names.iter().find(|name| !found.contains(name)) {
        return Err(Error::NoSuchDevice { name: name.clone(), found: found.join(", ") });
    }
    // Whoever names adapters wants those: a rank takes no other in place of its own.
    let Some(name) = names.get(local as usize % names.len().max(1)) else { return any(library, &found, local) };
    let (context, port, gid) = usable_port(library, name)?.map_err(|why| Error::NoPort { why })?;
    let count = names.len();
    let reason =
        format!("adapter {name}, address {gid} (GID {}): for local rank {local}, among {count} asked for", gid.index);
    Ok(Chosen { context, port, gid, reason })
}

/// One of those that can be used.
fn any(library: &Library, found: &[String], local: u32) -> Result<Chosen, Error> {
    let (mut usable, mut skipped) = (Vec::new(), Vec::new());
    for name in found {
        match usable_port(library, name) {
            Ok(Ok(found)) => usable.push(found),
            Ok(Err(why)) => skipped.push(why),
            Err(error) => skipped.push(error.to_string()),
        }
    }
    let (count, why) = (usable.len(), skipped.join("; "));
    let Some((context, port, gid)) = usable.into_iter().nth(local as usize % count.max(1)) else {
        return Err(Error::NoPort { why });
    };
    if !skipped.is_empty() {
        tracing::warn!(local, "adapters that were skipped: {why}");
    }
    let reason = format!(
        "adapter {}, address {gid} (GID {}): for local rank {local}, among {count} active",
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
