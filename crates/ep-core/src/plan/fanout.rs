//! What a forwarder knows of the rows that came along the rail: which ranks of its node got each.

use crate::topology::Rank;

/// Rows of one source rank that reached one node through this rank, in token order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fanout {
    tokens: Vec<u32>,
    /// `[rows + 1]`: where each row's list starts in `reached`.
    starts: Vec<u32>,
    /// Ranks of the node that the first row goes to, ascending, each with the row's position there; then the next row's.
    reached: Vec<(Rank, u32)>,
}

impl Default for Fanout {
    fn default() -> Self {
        Self { tokens: Vec::new(), starts: vec![0], reached: Vec::new() }
    }
}

impl Fanout {
    /// Adds the next row.
    pub(crate) fn push(&mut self, token: u32, reached: &[(Rank, u32)]) {
        self.tokens.push(token);
        self.reached.extend_from_slice(reached);
        self.starts.push(self.reached.len() as u32);
    }

    /// Adds the rows of a later channel.
    pub(crate) fn append(&mut self, later: &Self) {
        let before = self.reached.len() as u32;
        self.tokens.extend_from_slice(&later.tokens);
        self.starts.extend(later.starts[1..].iter().map(|start| before + start));
        self.reached.extend_from_slice(&later.reached);
    }

    /// `[rows]`: token of each row at its source, ascending.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The ranks of the node that row `row` went to, ascending, each with the row's position there.
    pub fn reached(&self, row: usize) -> &[(Rank, u32)] {
        &self.reached[self.starts[row] as usize..self.starts[row + 1] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_its_own_list_also_behind_those_of_another_channel() {
        let to = |ranks: &[u32]| ranks.iter().map(|&rank| (Rank(rank), 10 + rank)).collect::<Vec<_>>();
        let [mut first, mut later] = [Fanout::default(), Fanout::default()];
        first.push(3, &to(&[0, 2]));
        first.push(4, &[]);
        first.push(6, &to(&[1]));
        later.push(7, &to(&[2]));
        later.push(9, &to(&[0, 1]));
        first.append(&later);
        assert_eq!(first.tokens(), [3, 4, 6, 7, 9]);
        let lists: Vec<_> = (0..5).map(|row| first.reached(row)).collect();
        assert_eq!(lists, [to(&[0, 2]), vec![], to(&[1]), to(&[2]), to(&[0, 1])]);
    }
}
