//! What cards of a fabric are like: the link, and what an older or lesser card lacks.

/// The link between cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// RoCEv2: peers are addressed by MAC address and GID.
    Ethernet,
    /// InfiniBand: peers are addressed by LID.
    InfiniBand,
}

/// A model of card. [`Model::new`] has everything.
#[derive(Debug, Clone)]
pub struct Model {
    /// The link.
    pub link: Link,
    /// False: the vendor's library does not know the card (`mlx5dv_is_supported`).
    pub mlx5: bool,
    /// False: no firmware commands. A plain open succeeds all the same, and says nothing.
    pub devx: bool,
    /// False: no dmabuf can be registered.
    pub dmabuf: bool,
    /// False: no atomics.
    pub atomics: bool,
    /// False: memory cannot be relaxed. `ibv_reg_mr` refuses the flag, `ibv_reg_mr_iova2` drops it.
    pub relaxed_ordering: bool,
    /// False: doorbell pages of type NC-dedicated (1 << 31) are refused.
    pub nc_dedicated: bool,
    /// False: completion queues cannot ignore an overrun.
    pub cq_overrun_ignore: bool,
    /// The format of completions that queue pairs name their users in; 1 is what drivers know.
    pub cqe_version: u8,
    /// The logarithm of the longest send queue.
    pub log_max_qp_size: u8,
    /// The logarithm of the longest completion queue.
    pub log_max_cq_size: u8,
    /// The longest element, in bytes.
    pub max_element: u16,
    /// The path MTU that the port has, as a code: 5 is 4096, 3 is 1024.
    pub mtu: u8,
    /// False: the port is down.
    pub up: bool,
}

impl Model {
    /// A card with everything.
    pub fn new(link: Link) -> Self {
        Self {
            link,
            mlx5: true,
            devx: true,
            dmabuf: true,
            atomics: true,
            relaxed_ordering: true,
            nc_dedicated: true,
            cq_overrun_ignore: true,
            cqe_version: 1,
            log_max_qp_size: 15,
            log_max_cq_size: 22,
            max_element: 1024,
            mtu: 5,
            up: true,
        }
    }
}
