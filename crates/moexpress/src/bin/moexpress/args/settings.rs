//! The options that become [`Settings`].

use clap::{Args, ValueEnum};
use ep_core::settings::SettingsBuilder;
use ep_core::{Error, Nanos, Placement, Settings};

use super::parse_time;

/// How a number of an option is set.
type Set = fn(SettingsBuilder, u32) -> SettingsBuilder;

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct SettingsArgs {
    /// Where received rows land: through rings, or directly at their place where the arena has room [default: ring]
    #[arg(long, value_enum)]
    placement: Option<PlacementArg>,
    /// Rings from each rank to each other [default: chosen for the shape]
    #[arg(long, value_name = "N")]
    channels: Option<u32>,
    /// Rows that fit a ring [default: chosen for the shape]
    #[arg(long, value_name = "ROWS")]
    slots: Option<u32>,
    /// Rows after which a sender announces them [default: a quarter of the slots]
    #[arg(long, value_name = "ROWS")]
    chunk: Option<u32>,
    /// Rows after which a receiver returns their slots [default: a quarter of the slots]
    #[arg(long, value_name = "ROWS")]
    credit: Option<u32>,
    /// Rows that fit a ring between nodes [default: as within a node]
    #[arg(long, value_name = "ROWS")]
    far_slots: Option<u32>,
    /// Rows after which a sender announces them between nodes [default: a quarter of the slots]
    #[arg(long, value_name = "ROWS")]
    far_chunk: Option<u32>,
    /// Rows after which their slots are returned between nodes [default: a quarter of the slots]
    #[arg(long, value_name = "ROWS")]
    far_credit: Option<u32>,
    /// Size of each rank's arena for directly placed rows [default: chosen for the shape]
    #[arg(long, value_name = "BYTES")]
    arena_bytes: Option<u64>,
    /// How long one operation may take: 500ms, 60s, ...
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_time)]
    deadline: Nanos,
}

impl SettingsArgs {
    /// Of rings within a node.
    const fn near(&self) -> [(&'static str, Option<u32>, Set); 4] {
        [
            ("--channels", self.channels, SettingsBuilder::channels),
            ("--slots", self.slots, SettingsBuilder::slots),
            ("--chunk", self.chunk, SettingsBuilder::chunk),
            ("--credit", self.credit, SettingsBuilder::credit),
        ]
    }

    /// Of rings between nodes.
    const fn between(&self) -> [(&'static str, Option<u32>, Set); 3] {
        [
            ("--far-slots", self.far_slots, SettingsBuilder::far_slots),
            ("--far-chunk", self.far_chunk, SettingsBuilder::far_chunk),
            ("--far-credit", self.far_credit, SettingsBuilder::far_credit),
        ]
    }

    /// The first option given that only has a meaning between nodes.
    pub(crate) fn far(&self) -> Option<&'static str> {
        self.between().into_iter().find(|(_, value, _)| value.is_some()).map(|(name, ..)| name)
    }

    /// The first option given that only throughput mode heeds.
    pub(crate) fn of_throughput(&self) -> Option<&'static str> {
        let rings = self.near().map(|(name, value, _)| (name, value.is_some()));
        let before = [("--placement", self.placement.is_some())].into_iter().chain(rings);
        let mut given = before.chain([("--arena-bytes", self.arena_bytes.is_some())]);
        given.find(|(_, given)| *given).map(|(name, _)| name).or_else(|| self.far())
    }

    /// The settings of a communicator, from its automatic choice; with room for low latency or without.
    pub(crate) fn settings(&self, automatic: SettingsBuilder, low_latency: bool) -> Result<Settings, Error> {
        let placement = match self.placement {
            Some(PlacementArg::Direct) => Placement::Direct,
            Some(PlacementArg::Pulled) => Placement::Pulled,
            Some(PlacementArg::Ring) | None => Placement::Ring,
        };
        let builder = automatic.placement(placement).deadline(self.deadline);
        let mut builder = builder.low_latency(low_latency);
        for (_, value, set) in self.near().into_iter().chain(self.between()) {
            if let Some(value) = value {
                builder = set(builder, value);
            }
        }
        if let Some(bytes) = self.arena_bytes {
            builder = builder.arena_bytes(bytes);
        }
        builder.build()
    }
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum PlacementArg {
    /// Through rings
    Ring,
    /// At their final place
    Direct,
    /// In their sender's outbox, from where receivers pull them; one node
    Pulled,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    #[test]
    fn every_setting_reaches_the_communicator() {
        let line = "moexpress plan --placement direct --channels 2 --slots 8 --chunk 3 --credit 5 --arena-bytes 4096 --deadline 9s \
                    --nodes 2 --far-slots 16 --far-chunk 7 --far-credit 6";
        let Command::Plan(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else {
            panic!("a plan")
        };
        let topology = args.topology.topology().unwrap();
        let automatic = Settings::builder(&args.layer.shape(1).unwrap(), &topology);
        let settings = args.settings.settings(automatic, false).unwrap();
        let rings = settings.rings();
        assert_eq!((rings.channels, rings.near.slots, rings.near.chunk, rings.near.credit), (2, 8, 3, 5));
        assert_eq!((rings.far.slots, rings.far.chunk, rings.far.credit), (16, 7, 6));
        assert_eq!((settings.placement(), settings.arena_bytes()), (Placement::Direct, 4096));
        assert_eq!(settings.deadline(), Nanos::from_secs(9));
    }
}
