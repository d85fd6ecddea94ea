//! What is left of a dispatch's routing at one rank.

use std::sync::Arc;

use super::{Exchange, Expansion, Fanout, Plan};

/// Where the rows of a dispatch went and came from: enough to replay it, and to bring results back.
#[derive(Clone, Debug, Default)]
pub struct Routed {
    /// What this rank sent.
    pub plan: Arc<Plan>,
    /// What all ranks sent each other.
    pub exchange: Arc<Exchange>,
    /// `[nodes]`: tokens of this rank that went to each node.
    pub by_node: Vec<Vec<u32>>,
    /// `[nodes]`: rows that came along the rail from each node and were fanned out here.
    pub fanout: Vec<Fanout>,
    /// `[rows]`: token of each received row at its source.
    pub source_token: Vec<u32>,
    /// Where each choice stands, if the rows are by expert.
    pub expansion: Option<Arc<Expansion>>,
    /// Whether the host is not told which slots are whose.
    pub places_on_device: bool,
    /// Whether rows beyond the received ones become zeros.
    pub zero_spare: bool,
}
