//! What the timed scheduler knows of a machine: a few rates, latencies and costs.

use std::fmt;

use ep_core::{Error, Nanos};

/// Bytes that pass per second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Rate(pub u64);

impl Rate {
    /// `gb` gigabytes (10^9 bytes) per second.
    pub const fn gb_per_s(gb: u64) -> Self {
        Self(gb.saturating_mul(1_000_000_000))
    }

    /// The nanoseconds that `bytes` take, and what is left over: `rest` is the part of a nanosecond that earlier bytes
    /// have begun, in units of 1 ns / rate.
    pub(super) fn time(self, bytes: u64, rest: &mut u64) -> Nanos {
        const NANOS: u64 = 1_000_000_000;
        let (nanos, left) = match bytes.checked_mul(NANOS).and_then(|work| work.checked_add(*rest)) {
            Some(work) => (work / self.0, work % self.0),
            None => {
                let work = u128::from(bytes) * u128::from(NANOS) + u128::from(*rest);
                let nanos = u64::try_from(work / u128::from(self.0)).unwrap_or(u64::MAX);
                (nanos, (work % u128::from(self.0)) as u64)
            }
        };
        *rest = left;
        Nanos(nanos)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GB/s", self.0 as f64 / 1e9)
    }
}

/// One kind of link. Every rank has one port to it for each direction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Link {
    /// How fast one rank sends; and how fast one rank receives, from all peers together.
    pub rate: Rate,
    /// From the first byte's departure to its arrival.
    pub latency: Nanos,
}

/// A machine for the timed scheduler ([`crate::Builder::timed`]).
///
/// Sending a row costs the posting core `row + bytes / copy` (filling the source) and `post`; it leaves through the
/// rank's port as soon as what was posted there before has left, for `bytes / rate`; reaches the peer's port `latency`
/// later; enters as soon as what came before has entered, for `bytes / rate` again, both at the same time where nothing
/// is in the way; and is there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Model {
    pub(super) near: Link,
    pub(super) far: Link,
    pub(super) copy: Rate,
    pub(super) reduce: Rate,
    pub(super) row: Nanos,
    pub(super) post: Nanos,
    pub(super) publish: Nanos,
    pub(super) poll: Nanos,
    pub(super) launch: Nanos,
}

impl Model {
    /// Starts from links of 100 GB/s and 1 us within a node, 25 GB/s and 5 us between nodes; copies and sums at 100 GB/s
    /// a role; nothing else costs anything.
    pub const fn builder() -> ModelBuilder {
        ModelBuilder {
            model: Self {
                near: Link { rate: Rate::gb_per_s(100), latency: Nanos(1_000) },
                far: Link { rate: Rate::gb_per_s(25), latency: Nanos(5_000) },
                copy: Rate::gb_per_s(100),
                reduce: Rate::gb_per_s(100),
                row: Nanos(0),
                post: Nanos(0),
                publish: Nanos(0),
                poll: Nanos(0),
                launch: Nanos(0),
            },
        }
    }

    /// Every parameter with its value, as people read it.
    pub fn parameters(&self) -> Vec<(&'static str, String)> {
        let Self { near, far, copy, reduce, row, post, publish, poll, launch } = self;
        vec![
            ("near rate", near.rate.to_string()),
            ("near latency", near.latency.to_string()),
            ("far rate", far.rate.to_string()),
            ("far latency", far.latency.to_string()),
            ("copy rate of a role", copy.to_string()),
            ("reduce rate of a role", reduce.to_string()),
            ("row", row.to_string()),
            ("post", post.to_string()),
            ("publish", publish.to_string()),
            ("poll", poll.to_string()),
            ("launch", launch.to_string()),
        ]
    }

    /// One node of H200s on NVLink. Measured there: 354 GB/s a GPU when all write to all peers, 265 GB/s for the stores of
    /// 8 multiprocessors, which is what serves a role here. Assumed, not measured: latencies, costs, and the far link (as
    /// in [`Model::h800_cx7`]).
    pub const fn h200_node() -> Self {
        Self {
            near: Link { rate: Rate::gb_per_s(354), latency: Nanos(800) },
            copy: Rate::gb_per_s(265),
            reduce: Rate::gb_per_s(265),
            ..Self::h800_cx7()
        }
    }

    /// H800s on NVLink, one 400 Gb/s network card a GPU.
    ///
    /// | | | because |
    /// |---|---|---|
    /// | near rate | 160 GB/s | published, as the most that its users see; 0.8 of the nominal 200, as on H200 (354 of 450) |
    /// | far rate | 49 GB/s | 400 Gb/s, less the 82 bytes that RoCEv2 adds to each packet of 4096 |
    /// | far latency | 3 us | assumed: about 2 us of a small RDMA write between hosts, and the way to a GPU's memory |
    /// | near latency | 800 ns | assumed: a store and a flag through a switch |
    /// | copy, reduce | 200 GB/s a role | assumed: what several multiprocessors do; more than the links ask for |
    /// | row, post | 20 ns each | assumed |
    /// | publish, poll | 200 ns each | assumed: a fence of the system, a look at memory |
    /// | launch | 3 us | assumed: a kernel's start |
    pub const fn h800_cx7() -> Self {
        Self {
            near: Link { rate: Rate::gb_per_s(160), latency: Nanos(800) },
            far: Link { rate: Rate::gb_per_s(49), latency: Nanos(3_000) },
            copy: Rate::gb_per_s(200),
            reduce: Rate::gb_per_s(200),
            row: Nanos(20),
            post: Nanos(20),
            publish: Nanos(200),
            poll: Nanos(200),
            launch: Nanos(3_000),
        }
    }

    /// Nodes of an H200 over the loop (`docs/loop.md`), 50 GB/s a rank, where a kernel moves what is due and the rank's kernels have 24 multiprocessors
    /// and 24 channels: a role is a team of four warps. Measured by clocks in kernels and loop (`docs/cuda-tried.md`), with rows of 14 KB and the
    /// kernels of `f3bff2e1`.
    ///
    /// | | | because |
    /// |---|---|---|
    /// | far rate | 50 GB/s | what the loop was set to |
    /// | far latency | 30 us | from when the last byte is due until a role sees its cell: a pass of the proxy, a launch, the copy |
    /// | copy | 11.6 GB/s a role | a sender and a forwarder take 40 us for 32 rows |
    /// | reduce | 8 GB/s a role | a reducer takes 3 to 4 us for a token with two rows |
    /// | launch | 35 us | the first 64 rows are put 115 us after the kernels began, of which a sender takes 80 |
    /// | near rate, near latency | 2 TB/s, 1 us | assumed: within a GPU |
    /// | publish, poll | 1 us, 300 ns | assumed |
    ///
    /// Measured of those, of the kernels of `0d575cf5`, and as this has it, us: dispatch 1392 to 1402, 1319 and 1333, combine 1541 to 1551, 1367 and 1408. With a far rate of
    /// 100 GB/s 819 to 827, 742 and 743, 1009 to 1020, 862 and 904.
    pub const fn h200_loop() -> Self {
        Self {
            near: Link { rate: Rate::gb_per_s(2_000), latency: Nanos(1_000) },
            far: Link { rate: Rate::gb_per_s(50), latency: Nanos(30_000) },
            copy: Rate(11_600_000_000),
            reduce: Rate::gb_per_s(8),
            row: Nanos(0),
            post: Nanos(500),
            publish: Nanos(1_000),
            poll: Nanos(300),
            launch: Nanos(35_000),
        }
    }

    /// Ascend 910B servers of eight NPUs (Atlas A2), all pairs on HCCS, one 200 Gb/s RoCE port an NPU. No NPU was measured.
    ///
    /// | | | because |
    /// |---|---|---|
    /// | near rate | 128 GB/s | 7 links of 18.3, as HCCL's own model has them; shmem's documents say 28 each, 196 in all |
    /// | far rate | 20 GB/s | HCCL's model; the port's 200 Gb/s are 25, and 24.5 less the 82 bytes that RoCEv2 adds to each packet of 4096 |
    /// | copy | 18 GB/s a role | a role is a vector core: 1.2 TB/s of HBM for the 33 cores that move rows, each byte read and written. By its own port a core does 64 bytes a cycle, 115 |
    /// | reduce | 18 GB/s a role | assumed: as fast as rows come |
    /// | near latency | 1.5 us | assumed |
    /// | far latency | 5 us | assumed: a small RDMA write, and the way out of and into two NPUs' memory |
    /// | row, post | 500 ns each | assumed: events between pipes, headers by the scalar unit; an element and its doorbell, each awaited |
    /// | publish, poll | 500 ns each | assumed: a copy of 8 bytes that is awaited; a line that is cleaned and read |
    /// | launch | 10 us | assumed |
    ///
    /// A near rate is that of all seven links together: that two ranks have one link between them is not modelled.
    pub const fn ascend_a2() -> Self {
        Self {
            near: Link { rate: Rate::gb_per_s(128), latency: Nanos(1_500) },
            far: Link { rate: Rate::gb_per_s(20), latency: Nanos(5_000) },
            copy: Rate::gb_per_s(18),
            reduce: Rate::gb_per_s(18),
            row: Nanos(500),
            post: Nanos(500),
            publish: Nanos(500),
            poll: Nanos(500),
            launch: Nanos(10_000),
        }
    }
}

/// Collects what differs from the start of [`Model::builder`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ModelBuilder {
    model: Model,
}

impl ModelBuilder {
    /// The link between ranks of one node, a rank's own lane to itself included.
    pub const fn near(mut self, rate: Rate, latency: Nanos) -> Self {
        self.model.near = Link { rate, latency };
        self
    }

    /// The link between nodes: every rank has a network card of this rate each way.
    pub const fn far(mut self, rate: Rate, latency: Nanos) -> Self {
        self.model.far = Link { rate, latency };
        self
    }

    /// How fast one role copies rows between the window and other memory ([`ep_core::port::Work::Row`]).
    pub const fn copy(mut self, rate: Rate) -> Self {
        self.model.copy = rate;
        self
    }

    /// How fast one role sums rows, in bytes of rows added ([`ep_core::port::Work::Reduce`]).
    pub const fn reduce(mut self, rate: Rate) -> Self {
        self.model.reduce = rate;
        self
    }

    /// What each row that is copied or summed costs its role besides its bytes.
    pub const fn row(mut self, cost: Nanos) -> Self {
        self.model.row = cost;
        self
    }

    /// What posting a put or a get costs its role.
    pub const fn post(mut self, cost: Nanos) -> Self {
        self.model.post = cost;
        self
    }

    /// What a publish costs its role: fences included.
    pub const fn publish(mut self, cost: Nanos) -> Self {
        self.model.publish = cost;
        self
    }

    /// How long after a cell has changed a role that waits for it goes on.
    pub const fn poll(mut self, cost: Nanos) -> Self {
        self.model.poll = cost;
        self
    }

    /// What each operation costs a rank before its roles begin.
    pub const fn launch(mut self, cost: Nanos) -> Self {
        self.model.launch = cost;
        self
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first rate outside 1 B/s to 10^15 B/s or time beyond 1 s.
    pub fn build(self) -> Result<Model, Error> {
        let Model { near, far, copy, reduce, row, post, publish, poll, launch } = self.model;
        const FASTEST: u64 = 1_000_000_000_000_000;
        for (what, Rate(rate)) in
            [("near rate", near.rate), ("far rate", far.rate), ("copy rate", copy), ("reduce rate", reduce)]
        {
            if !(1..=FASTEST).contains(&rate) {
                return Err(Error::invalid(what, rate, format_args!("1 to {FASTEST} bytes per second")));
            }
        }
        for (what, time) in [
            ("near latency", near.latency),
            ("far latency", far.latency),
            ("row cost", row),
            ("post cost", post),
            ("publish cost", publish),
            ("poll cost", poll),
            ("launch cost", launch),
        ] {
            if time > Nanos::from_secs(1) {
                return Err(Error::invalid(what, time, "at most 1 s"));
            }
        }
        Ok(self.model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_outside_their_limits_are_named() {
        let error = |builder: ModelBuilder| builder.build().unwrap_err().to_string();
        let stopped = Model::builder().near(Rate(0), Nanos(0));
        assert_eq!(error(stopped), "near rate is 0, allowed: 1 to 1000000000000000 bytes per second");
        assert_eq!(error(Model::builder().poll(Nanos::from_secs(2))), "poll cost is 2.00 s, allowed: at most 1 s");
    }

    #[test]
    fn parts_of_nanoseconds_are_not_lost() {
        let (rate, mut rest) = (Rate(3_000_000_000), 0);
        let times: Vec<u64> = (0..6).map(|_| rate.time(1, &mut rest).0).collect();
        assert_eq!(times, [0, 0, 1, 0, 0, 1]);
        assert_eq!(rate.time(u64::MAX, &mut rest), Nanos(u64::MAX / 3));
    }
}
