//! What the kernel takes that plays an adapter.

use ep_core::c_struct;

c_struct! {
    /// A queue pair that sends, or that is broken and flushes.
    pub(crate) struct HcaQueue = "EpHcaQueue" {
        /// Address of its elements, 64 bytes each.
        pub(crate) elements: u64,
        /// Address of its doorbell record.
        pub(crate) record: u64,
        /// Address of its completions, 64 bytes each.
        pub(crate) completions: u64,
        /// Nanoseconds after which a peer that does not answer is given up; all bits for never.
        pub(crate) patience: u64,
        /// Elements that the adapter was told of, ever.
        pub(crate) produced: u64,
        /// Of those, carried out or flushed.
        pub(crate) retired: u64,
        /// Completions written, ever.
        pub(crate) written: u64,
        /// Elements begun: by this launch, or carried out or flushed before it.
        pub(crate) begun: u64,
        /// When the adapter was told of the last of them.
        pub(crate) heard: u64,
        /// Since when the peer has not answered; 0 where it does.
        pub(crate) silent: u64,
        /// The element that is to fail; all bits for none.
        pub(crate) planted: u64,
        /// How it is to fail.
        pub(crate) planted_syndrome: u32,
        /// Its number.
        pub(crate) number: u32,
        /// Its elements, as the power of two.
        pub(crate) log_elements: u32,
        /// Its completions, as the power of two.
        pub(crate) log_completions: u32,
        /// What completions carry.
        pub(crate) user: u32,
        /// Bytes of the longest message, as the power of two.
        pub(crate) log_longest: u32,
        /// Regions that own keys may be of: the first.
        pub(crate) own: u32,
        /// How many.
        pub(crate) own_count: u32,
        /// Regions that the peer's keys may be of: the first.
        pub(crate) peer: u32,
        /// How many.
        pub(crate) peer_count: u32,
        /// What the peer's queue pair lets it do: access bits of regions.
        pub(crate) rights: u32,
        /// Whether there is a peer that answers.
        pub(crate) answers: u32,
        /// How the element behind those that were begun fails; 0 where it does not.
        pub(crate) fault: u32,
        /// What broke it; 0 where nothing did.
        pub(crate) syndrome: u32,
    }
}

c_struct! {
    /// Memory that elements may name.
    pub(crate) struct HcaRegion = "EpHcaRegion" {
        /// The address that stands for its first byte.
        pub(crate) iova: u64,
        /// Where that lies.
        pub(crate) base: u64,
        /// Its size.
        pub(crate) bytes: u64,
        /// Its key at its adapter.
        pub(crate) local_key: u32,
        /// Its key for peers.
        pub(crate) remote_key: u32,
        /// EP_HCA_...
        pub(crate) access: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

/// Elements of a batch at most, and stretches of memory that they name.
pub(crate) const HCA_BATCH: u32 = 32;
/// Batches of a launch at most that are under way: the bits of `HcaState::open`.
pub(crate) const HCA_JOBS: u32 = 64;

c_struct! {
    /// A batch of elements under way. Nothing in it outlasts a launch.
    pub(crate) struct HcaJob = "EpHcaJob" {
        /// The upper half: pieces that its writes were cut into. The lower half: those that were asked for.
        pub(crate) pieces: u64,
        /// Pieces that were copied.
        pub(crate) done: u64,
        /// Of each stretch of its writes, where it goes.
        pub(crate) to: [u64; HCA_BATCH as usize],
        /// Where it lies.
        pub(crate) from: [u64; HCA_BATCH as usize],
        /// The lower half: its bytes. The upper half: pieces of it and all before.
        pub(crate) sizes: [u64; HCA_BATCH as usize],
        /// Of each element, opcode << 32 | bytes.
        pub(crate) told: [u64; HCA_BATCH as usize],
        /// Of the last element, where it waits for all others: where it goes.
        pub(crate) last_to: u64,
        /// Where its bytes lie, or where the word goes that it finds.
        pub(crate) last_at: u64,
        /// Its bytes.
        pub(crate) last_bytes: u64,
        /// What it adds.
        pub(crate) last_add: u64,
    }
}

c_struct! {
    /// What the blocks of a launch share.
    pub(crate) struct HcaState = "EpHcaState" {
        /// When the link will have sent all that was given to it.
        pub(crate) link: u64,
        /// When something happened last.
        pub(crate) active: u64,
        /// A bit for each batch with pieces that nobody has taken.
        pub(crate) open: u64,
        /// Not 0: the launch ends, as nothing has happened for long.
        pub(crate) over: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_hca_kernel.
    pub(crate) struct Hca = "EpHcaArgs" {
        /// EpHcaQueue [queue_count].
        pub(crate) queues: u64,
        /// EpHcaRegion.
        pub(crate) regions: u64,
        /// Addresses of doorbell registers, u64 [register_count].
        pub(crate) registers: u64,
        /// What was seen in them, u64 [blocks, register_count].
        pub(crate) seen: u64,
        /// EpHcaJob, as many as EpHcaState.open has bits.
        pub(crate) jobs: u64,
        /// EpHcaState.
        pub(crate) state: u64,
        /// Mapped u32: not 0 where the launch is to end at once.
        pub(crate) halt: u64,
        /// Nanoseconds from when the link has sent a message until it has arrived and is known to have.
        pub(crate) latency: u64,
        /// Nanoseconds without anything to do after which the launch ends.
        pub(crate) idle: u64,
        /// Femtoseconds that the link takes for a byte.
        pub(crate) pace: u32,
        /// Queue pairs.
        pub(crate) queue_count: u32,
        /// Registers, at most 32.
        pub(crate) register_count: u32,
        /// Bytes of a piece, in units of 512: the block's shared memory has room for two for each warp but the first.
        pub(crate) piece: u32,
    }
}
