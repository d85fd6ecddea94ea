//! How a communicator uses memory and time: ring sizes, placement, arena, deadline.

mod builder;
mod outbox_use;

pub use builder::SettingsBuilder;
pub use outbox_use::{MOST_PIECE, OutboxSteps, OutboxUse, least_window};

use crate::error::Error;
use crate::plant::{Before, Plant, Planted};
use crate::ring::Geometry;
use crate::shape::Shape;
use crate::terms::Nanos;
use crate::topology::Topology;

/// The most channels one communicator may have.
pub const MAX_CHANNELS: u32 = 64;
/// The most slots one ring may have.
pub const MAX_SLOTS: u32 = 1 << 20;

/// Where the rows of a dispatch land.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Placement {
    /// Through rings, then copied into memory of the receiver: bounded by the settings, whatever the batch.
    #[default]
    Ring,
    /// At their final place in the receiver's arena where it has room for them, else through rings, or through
    /// [outboxes](SettingsBuilder::outboxes).
    Direct,
    /// In the outbox of their sender, a part of its own window, from which the ranks of its node pull them into memory of
    /// their own: bounded by the settings, whatever the batch. Results return in the same way. One node only.
    Pulled,
}

impl Placement {
    /// Refuses what this placement cannot serve.
    ///
    /// # Errors
    /// [`Error::Invalid`] for [`Self::Pulled`] on several nodes.
    pub(crate) fn check(self, topology: &Topology) -> Result<(), Error> {
        if self == Self::Pulled && topology.nodes() > 1 {
            return Err(Error::invalid("nodes", topology.nodes(), "1 with pulled placement"));
        }
        Ok(())
    }
}

/// How the rings of a call cut the memory that the communicator set aside for them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rings {
    /// Rings of each kind from each writer to each reader; each serves an equal share of the tokens.
    pub channels: u32,
    /// Rings within a node: rows, producer's and consumer's steps of each. Small steps: latency.
    pub near: Geometry,
    /// Rings between nodes, along a rail; unused on one node. Large steps: bandwidth.
    pub far: Geometry,
}

impl Rings {
    /// Rings of one geometry within nodes and between them.
    pub const fn uniform(channels: u32, geometry: Geometry) -> Self {
        Self { channels, near: geometry, far: geometry }
    }

    /// Checks the sizes against each other and their limits.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first value outside its limits.
    pub fn check(&self) -> Result<(), Error> {
        let Self { channels, near, far } = *self;
        for (what, value, limit) in [
            ("channels", channels, MAX_CHANNELS),
            ("ring slots", near.slots, MAX_SLOTS),
            ("ring chunk", near.chunk, near.slots),
            ("ring credit", near.credit, near.slots),
            ("far ring slots", far.slots, MAX_SLOTS),
            ("far ring chunk", far.chunk, far.slots),
            ("far ring credit", far.credit, far.slots),
        ] {
            if value == 0 || value > limit {
                return Err(Error::invalid(what, value, format_args!("1 to {limit}")));
            }
        }
        Ok(())
    }
}

/// Lanes of single rows to a peer: as many as [`LaneKind::LowRow`](crate::port::LaneKind::LowRow) can number.
const ROW_LANES: u32 = 1 << 16;

/// A communicator's use of memory and time, the same on every rank, validated once by [`Settings::builder`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    rings: Rings,
    outboxes: Option<Rings>,
    placement: Placement,
    arena_bytes: u64,
    low_latency: bool,
    low_latency_units: bool,
    low_latency_unit_bytes: u64,
    low_latency_announced: bool,
    low_latency_per_choice: bool,
    deadline: Nanos,
    planted: Planted,
    before: Before,
}

impl Settings {
    /// Sensible settings for a shape and topology: what [`SettingsBuilder::build`] chooses when nothing is set.
    pub fn auto(shape: &Shape, topology: &Topology) -> Self {
        Self::builder(shape, topology).chosen()
    }

    /// Starts from the automatic choice.
    pub fn builder(shape: &Shape, topology: &Topology) -> SettingsBuilder {
        SettingsBuilder::new(*shape, *topology)
    }

    /// The rings of a call that says nothing else; the window is cut for these.
    pub const fn rings(&self) -> Rings {
        self.rings
    }

    /// How the outboxes are cut through which batches go that have no room in an arena; none where they go through rings.
    pub const fn outboxes(&self) -> Option<Rings> {
        self.outboxes
    }

    /// Whether rows may lie in outboxes: always, or where an arena has no room for them.
    pub fn has_outboxes(&self) -> bool {
        self.placement == Placement::Pulled || self.outboxes.is_some()
    }

    /// Channels of a window: as many as any call may have.
    pub(crate) fn channels(&self) -> u32 {
        self.rings.channels.max(self.outboxes.map_or(0, |outboxes| outboxes.channels))
    }

    /// Where the rows of a dispatch land.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// Bytes of the arena in each window, from which grants and output buffers come.
    pub const fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// Whether windows have room for low latency.
    pub const fn low_latency(&self) -> bool {
        self.low_latency
    }

    /// Whether low latency travels as units.
    pub const fn low_latency_units(&self) -> bool {
        self.low_latency_units
    }

    /// The most bytes of results that come as units to the tokens of a rank, from other ranks.
    pub const fn low_latency_unit_bytes(&self) -> u64 {
        self.low_latency_unit_bytes
    }

    /// Whether each row of low latency in a slot is announced by itself.
    pub const fn low_latency_announced(&self) -> bool {
        self.low_latency_announced
    }

    /// Whether there is room for combines of low latency that bring back a row a choice.
    pub const fn low_latency_per_choice(&self) -> bool {
        self.low_latency_per_choice
    }

    /// How long one operation may take, a peer's slow experts included.
    pub const fn deadline(&self) -> Nanos {
        self.deadline
    }

    /// The same with other time allowed to an operation.
    ///
    /// # Errors
    /// [`Error::Invalid`] for none.
    pub fn with_deadline(mut self, deadline: Nanos) -> Result<Self, Error> {
        if deadline == Nanos(0) {
            return Err(Error::invalid("deadline", deadline, "more than 0 ns"));
        }
        self.deadline = deadline;
        Ok(self)
    }

    /// The same with a planted protocol fault, to show that tests catch it.
    #[cfg(feature = "plant")]
    #[must_use]
    pub const fn with_plant(mut self, plant: Plant) -> Self {
        self.planted = Planted::new(plant);
        self
    }

    /// The same with low latency as units where that is possible.
    #[must_use]
    pub const fn with_units(mut self, topology: &Topology) -> Self {
        self.low_latency_units = self.low_latency && topology.nodes() == 1;
        self
    }

    /// Refuses more tokens than there may be lanes of single rows, where each row is announced.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub(crate) fn check_row_lanes(&self, shape: &Shape) -> Result<(), Error> {
        let tokens = shape.max_tokens();
        if !self.low_latency_announced || tokens <= ROW_LANES {
            return Ok(());
        }
        Err(Error::invalid("max tokens", tokens, format_args!("at most {ROW_LANES} where rows are announced")))
    }

    /// The same with rows of low latency announced one by one, where there is low latency.
    #[must_use]
    pub const fn with_announced_rows(mut self) -> Self {
        self.low_latency_announced = self.low_latency;
        self
    }

    /// The same after so many operations of low latency: tags of units count on from there.
    #[cfg(feature = "plant")]
    #[must_use]
    pub const fn with_operations_before(mut self, operations: u64) -> Self {
        self.before = Before(operations);
        self
    }

    /// Operations of low latency before the first one: none, without the feature `plant`.
    pub const fn operations_before(&self) -> u64 {
        self.before.operations()
    }

    /// Whether tests planted this fault: never, without the feature `plant`.
    pub(crate) fn plants(&self, plant: Plant) -> bool {
        self.planted.is(plant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape::builder().experts(16).topk(4).hidden(64).max_tokens(128).build().unwrap()
    }

    #[test]
    fn steps_beyond_the_ring_are_refused() {
        let topology = Topology::new(1, 4).unwrap();
        let error = Settings::builder(&shape(), &topology).slots(4).chunk(5).build().unwrap_err();
        assert_eq!(error.to_string(), "ring chunk is 5, allowed: 1 to 4");
    }

    #[test]
    fn rows_are_pulled_within_one_node_only() {
        let built = |nodes| {
            let topology = Topology::new(nodes, 4).unwrap();
            Settings::builder(&shape(), &topology).placement(Placement::Pulled).build()
        };
        assert_eq!(built(2).unwrap_err().to_string(), "nodes is 2, allowed: 1 with pulled placement");
        assert_eq!(built(1).unwrap().arena_bytes(), 0);
    }

    #[test]
    fn outboxes_are_for_direct_placement_within_one_node() {
        let refused = |nodes, placement, channels| {
            let topology = Topology::new(nodes, 4).unwrap();
            let settings = Settings::builder(&shape(), &topology).placement(placement).outboxes(channels);
            settings.build().map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(refused(1, Placement::Direct, 3), Ok(()));
        assert_eq!(refused(2, Placement::Direct, 3).unwrap_err(), "nodes is 2, allowed: 1 with outboxes");
        assert_eq!(refused(1, Placement::Ring, 3).unwrap_err(), "outboxes is 3, allowed: only with direct placement");
        assert_eq!(refused(1, Placement::Direct, 0).unwrap_err(), "channels is 0, allowed: 1 to 64");
    }

    #[test]
    fn units_are_for_low_latency_within_one_node() {
        let refused = |nodes, low_latency| {
            let topology = Topology::new(nodes, 4).unwrap();
            let settings = Settings::builder(&shape(), &topology).low_latency(low_latency).low_latency_units(true);
            settings.build().map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(refused(1, true), Ok(()));
        assert_eq!(refused(2, true).unwrap_err(), "nodes is 2, allowed: 1 with low latency as units");
        let alone = "low latency as units is true, allowed: only with low_latency(true)";
        assert_eq!(refused(1, false).unwrap_err(), alone);
    }

    #[test]
    fn channels_are_as_many_as_warps_carry() {
        let shape = Shape::builder().experts(64).topk(8).hidden(7168).build().unwrap();
        let rings = |nodes, ranks, placement, warps: Option<u32>| {
            let topology = Topology::new(nodes, ranks).unwrap();
            let settings = Settings::builder(&shape, &topology).placement(placement).arena_bytes(1 << 20);
            let settings = warps.into_iter().fold(settings, SettingsBuilder::role_warps).build().unwrap();
            (settings.rings().channels, settings.rings().far.slots)
        };
        let (ring, direct) = (Placement::Ring, Placement::Direct);
        assert_eq!(
            rings(2, 1, direct, Some(96)),
            (24, 256),
            "two for each node's rank and one for the own: 3 a channel, of which there are no more than 24"
        );
        assert_eq!(rings(2, 2, ring, Some(96)), (16, 256));
        assert_eq!(rings(2, 8, ring, Some(96)), (4, 256));
        assert_eq!(rings(8, 8, ring, Some(8)), (1, 256), "some role has to be played");
        assert_eq!(rings(1, 4, ring, Some(96)), (13, 128));
        assert_eq!(rings(1, 1, ring, Some(96)), (32, 128));
        assert_eq!(
            rings(1, 4, direct, Some(96)),
            rings(1, 4, direct, None),
            "no row goes through rings there as a rule"
        );
        assert_eq!(rings(2, 2, ring, None).0, 1);
    }

    #[test]
    fn the_automatic_choice_is_valid_for_every_size() {
        for (ranks, hidden) in [(1, 1), (3, 2880), (8, 7168), (1024, 65536)] {
            let shape = Shape::builder().experts(ranks).topk(1).hidden(hidden).build().unwrap();
            let topology = Topology::new(1, ranks).unwrap();
            let settings = Settings::builder(&shape, &topology).build().unwrap();
            assert_eq!(settings, Settings::auto(&shape, &topology));
            assert!(settings.rings().near.slots >= 8);
        }
    }
}
