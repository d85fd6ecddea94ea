//! Settings that are tried.

use ep_core::ring::Geometry;
use ep_core::settings::SettingsBuilder;
use ep_core::{Error, Layout, Placement, Rings, Settings, Shape, Topology};

/// What `tune` varies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Candidate {
    pub(super) placement: Placement,
    pub(super) rings: Rings,
}

/// One of the values that a [`Candidate`] has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Knob {
    Placement,
    Channels,
    Slots,
    Chunk,
    Credit,
    FarSlots,
    FarChunk,
    FarCredit,
}

impl Knob {
    /// In the order in which they are varied; those between nodes only where there are several.
    pub(super) fn all(nodes: u32) -> &'static [Self] {
        use Knob::{Channels, Chunk, Credit, FarChunk, FarCredit, FarSlots, Placement, Slots};
        const ALL: [Knob; 8] = [Placement, Channels, FarSlots, FarChunk, FarCredit, Slots, Chunk, Credit];
        const NEAR: [Knob; 5] = [Placement, Channels, Slots, Chunk, Credit];
        if nodes > 1 { &ALL } else { &NEAR }
    }
}

const CHANNELS: [u32; 5] = [1, 2, 4, 8, 16];
const SLOTS: [u32; 7] = [8, 16, 32, 64, 128, 256, 512];
/// Chunks and credits, as parts of the slots.
const PARTS: [u32; 5] = [2, 4, 8, 16, 32];

impl Candidate {
    pub(super) fn of(settings: &Settings) -> Self {
        Self { placement: settings.placement(), rings: settings.rings() }
    }

    /// The same with other values of one knob, this one's among them.
    pub(super) fn variants(&self, knob: Knob) -> Vec<Self> {
        let (near, far) = (self.rings.near, self.rings.far);
        let with = |rings: Rings| Self { rings, ..*self };
        let with_near = |near: Geometry| with(Rings { near, ..self.rings });
        let with_far = |far: Geometry| with(Rings { far, ..self.rings });
        let part = |slots: u32, part: u32| (slots / part).max(1);
        match knob {
            Knob::Placement => {
                [Placement::Ring, Placement::Direct].map(|placement| Self { placement, ..*self }).to_vec()
            }
            Knob::Channels => CHANNELS.map(|channels| with(Rings { channels, ..self.rings })).to_vec(),
            Knob::Slots => SLOTS.map(|slots| with_near(resized(near, slots))).to_vec(),
            Knob::Chunk => PARTS.map(|at| with_near(Geometry { chunk: part(near.slots, at), ..near })).to_vec(),
            Knob::Credit => PARTS.map(|at| with_near(Geometry { credit: part(near.slots, at), ..near })).to_vec(),
            Knob::FarSlots => SLOTS.map(|slots| with_far(resized(far, slots))).to_vec(),
            Knob::FarChunk => PARTS.map(|at| with_far(Geometry { chunk: part(far.slots, at), ..far })).to_vec(),
            Knob::FarCredit => PARTS.map(|at| with_far(Geometry { credit: part(far.slots, at), ..far })).to_vec(),
        }
    }

    fn set(&self, builder: SettingsBuilder, nodes: u32) -> SettingsBuilder {
        let Rings { channels, near, far } = self.rings;
        let builder = builder.placement(self.placement).channels(channels);
        let builder = builder.slots(near.slots).chunk(near.chunk).credit(near.credit);
        if nodes == 1 {
            return builder;
        }
        builder.far_slots(far.slots).far_chunk(far.chunk).far_credit(far.credit)
    }

    pub(super) fn settings(&self, shape: &Shape, topology: &Topology) -> Result<Settings, Error> {
        self.set(Settings::builder(shape, topology), topology.nodes()).build()
    }

    /// The calls that make these settings.
    pub(super) fn calls(&self, nodes: u32) -> String {
        let values = self.values(nodes).into_iter().map(|(name, value)| format!(".{name}({value})"));
        let placement = match self.placement {
            Placement::Ring => "",
            Placement::Direct => ".placement(Placement::Direct)",
            Placement::Pulled => ".placement(Placement::Pulled)",
        };
        format!("Settings::builder(&shape, &topology){placement}{}.build()?", values.collect::<String>())
    }

    /// The arguments of the command line that make them.
    pub(super) fn flags(&self, nodes: u32) -> String {
        let values =
            self.values(nodes).into_iter().map(|(name, value)| format!(" --{} {value}", name.replace('_', "-")));
        format!("--placement {}{}", self.placement_name(), values.collect::<String>())
    }

    pub(super) const fn placement_name(&self) -> &'static str {
        match self.placement {
            Placement::Ring => "ring",
            Placement::Direct => "direct",
            Placement::Pulled => "pulled",
        }
    }

    pub(super) fn values(&self, nodes: u32) -> Vec<(&'static str, u32)> {
        let Rings { channels, near, far } = self.rings;
        let mut values =
            vec![("channels", channels), ("slots", near.slots), ("chunk", near.chunk), ("credit", near.credit)];
        if nodes > 1 {
            values.extend([("far_slots", far.slots), ("far_chunk", far.chunk), ("far_credit", far.credit)]);
        }
        values
    }
}

/// The ring with other slots, its chunk and credit the same part of them.
fn resized(ring: Geometry, slots: u32) -> Geometry {
    let scaled = |steps: u32| (u64::from(steps) * u64::from(slots) / u64::from(ring.slots)).max(1) as u32;
    Geometry { slots, chunk: scaled(ring.chunk), credit: scaled(ring.credit) }
}

/// Bytes of a window: all of it, and its rings with their staging memory.
pub(super) fn bytes(shape: &Shape, topology: &Topology, settings: &Settings) -> Result<(u64, u64), Error> {
    let layout = Layout::new(shape, topology, settings)?;
    let rings = ["near rings", "far rings", "near staging", "far staging"];
    let regions = layout.regions();
    let rings = regions.iter().filter(|region| rings.contains(&region.name)).map(|region| region.span.len).sum();
    Ok((layout.window_bytes(), rings))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate() -> (Shape, Topology, Candidate) {
        let shape = Shape::builder().experts(16).topk(4).hidden(64).max_tokens(128).build().unwrap();
        let topology = Topology::new(2, 2).unwrap();
        let settings = Settings::builder(&shape, &topology).slots(64).chunk(8).credit(16).build().unwrap();
        (shape, topology, Candidate::of(&settings))
    }

    #[test]
    fn every_variant_is_valid_and_differs_in_its_knob_only() {
        let (shape, topology, candidate) = candidate();
        for &knob in Knob::all(2) {
            let variants = candidate.variants(knob);
            assert!(variants.len() > 1);
            for variant in variants {
                assert_eq!(Candidate::of(&variant.settings(&shape, &topology).unwrap()), variant, "{knob:?}");
                let near_is_the_same = variant.rings.near == candidate.rings.near;
                assert!(near_is_the_same || matches!(knob, Knob::Slots | Knob::Chunk | Knob::Credit), "{knob:?}");
            }
        }
    }

    #[test]
    fn chunks_and_credits_stay_the_same_part_of_the_slots() {
        let ring = Geometry { slots: 64, chunk: 8, credit: 16 };
        assert_eq!(resized(ring, 256), Geometry { slots: 256, chunk: 32, credit: 64 });
        assert_eq!(resized(ring, 8), Geometry { slots: 8, chunk: 1, credit: 2 });
    }

    #[test]
    fn calls_and_flags_name_every_value() {
        let (_, _, candidate) = candidate();
        let calls = "Settings::builder(&shape, &topology).channels(1).slots(64).chunk(8).credit(16)";
        assert_eq!(candidate.calls(1), format!("{calls}.build()?"));
        assert_eq!(candidate.calls(2), format!("{calls}.far_slots(64).far_chunk(16).far_credit(16).build()?"));
        assert_eq!(candidate.flags(1), "--placement ring --channels 1 --slots 64 --chunk 8 --credit 16");
    }
}
