//! What the kernels can do.

use ep_core::{Error, Layout, Placement};

/// Ranks of a server at most, where there is one; of several each has up to 8.
pub const MOST_NEAR: u32 = 16;

/// Servers at most: `EP_PEERS` of the kernels, and one.
const MOST_NODES: u32 = 4;

/// Channels at most where there are several servers: `EP_FAR_CHANNELS` of the kernels.
const MOST_FAR_CHANNELS: u32 = 8;

/// Ranks at most.
pub const MOST_RANKS: u32 = 32;

/// Numbers of a counts message, at most: `EP_MOST_COUNTS` of the kernels.
const MOST_COUNTS: u32 = 4096;

/// Whether the kernels can carry what a communicator of this layout carries. To be asked before anything is launched: kernels do not look.
///
/// # Errors
/// [`Error::Invalid`] for more than 4 nodes, more ranks of a node than 16, or than 8 of several, more than 8 channels between nodes, more ranks and experts than a counts message has room for, or
/// pulled placement. Direct placement is a hint: rows go through rings all the same.
pub fn check(layout: &Layout) -> Result<(), Error> {
    let topology = layout.topology();
    let (nodes, near) = (topology.nodes(), topology.ranks_per_node());
    if nodes > MOST_NODES {
        return Err(Error::invalid("nodes", nodes, format_args!("1 to {MOST_NODES}")));
    }
    let most = if nodes == 1 { MOST_NEAR } else { MOST_RANKS / MOST_NODES };
    if near > most {
        return Err(Error::invalid("ranks of a node", near, format_args!("1 to {most}")));
    }
    let channels = layout.settings().rings().channels;
    if nodes > 1 && channels > MOST_FAR_CHANNELS {
        return Err(Error::invalid("channels over several nodes", channels, format_args!("1 to {MOST_FAR_CHANNELS}")));
    }
    let counts = topology.ranks().saturating_add(layout.shape().experts());
    if counts > MOST_COUNTS {
        return Err(Error::invalid("ranks and experts together", counts, format_args!("up to {MOST_COUNTS}")));
    }
    if let Some(outboxes) = layout.settings().outboxes() {
        return Err(Error::invalid("outboxes", outboxes.channels, "none: there are no kernels that pull yet"));
    }
    match layout.settings().placement() {
        Placement::Ring | Placement::Direct => Ok(()),
        Placement::Pulled => {
            Err(Error::invalid("placement", "pulled", "ring or direct: there are no kernels that pull yet"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ep_core::{Settings, Shape, Topology};

    fn said(nodes: u32, ranks: u32, experts: u32, placement: Placement) -> Option<String> {
        let topology = Topology::new(nodes, ranks).expect("a topology");
        let shape = Shape::builder().experts(nodes * ranks * experts).topk(1).hidden(16).max_tokens(4);
        let shape = shape.build().expect("a shape");
        let settings =
            Settings::builder(&shape, &topology).low_latency(false).placement(placement).build().expect("settings");
        let layout = Layout::new(&shape, &topology, &settings).expect("a layout");
        check(&layout).err().map(|error| error.to_string())
    }

    #[test]
    fn what_the_kernels_cannot_do_is_refused_by_name() {
        let refused =
            |said: Option<String>, what: &str| assert!(said.as_ref().is_some_and(|s| s.contains(what)), "{said:?}");
        assert_eq!(said(1, 16, 1, Placement::Ring), None);
        assert_eq!(said(1, 16, 255, Placement::Direct), None);
        assert_eq!(said(4, 8, 1, Placement::Ring), None);
        refused(said(5, 1, 1, Placement::Ring), "nodes is 5, allowed: 1 to 4");
        refused(said(2, 9, 1, Placement::Ring), "ranks of a node is 9, allowed: 1 to 8");
        refused(said(1, 17, 1, Placement::Ring), "1 to 16");
        refused(said(1, 16, 256, Placement::Ring), "ranks and experts together is 4112");
        refused(said(1, 2, 1, Placement::Pulled), "placement is pulled");
    }

    #[test]
    fn outboxes_have_no_kernels() {
        let topology = Topology::new(1, 2).expect("a topology");
        let shape = Shape::builder().experts(2).topk(1).hidden(16).max_tokens(4).build().expect("a shape");
        let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).outboxes(3).build();
        let layout = Layout::new(&shape, &topology, &settings.expect("settings")).expect("a layout");
        let said = check(&layout).expect_err("refused").to_string();
        assert_eq!(said, "outboxes is 3, allowed: none: there are no kernels that pull yet");
    }
}
