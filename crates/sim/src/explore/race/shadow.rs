//! What was last done to each byte of a window, as intervals.

use std::collections::BTreeMap;
use std::rc::Rc;

use ep_core::port::{Span, Tag};

use super::clock::{Clock, known};
use crate::violation::AccessKind;

/// One access, as later ones are checked against it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    /// The component whose event `at` must be known to whoever comes after this access.
    pub(super) component: u32,
    pub(super) at: u32,
    /// For reports: who, how, which bytes.
    pub(super) actor: u32,
    pub(super) kind: AccessKind,
    pub(super) span: Span,
}

impl Mark {
    fn known_to(&self, clock: &[u32]) -> bool {
        known(clock, self.component) >= self.at
    }
}

/// What whoever does an access knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Knowledge<'a> {
    /// What has happened.
    pub(super) clock: &'a [u32],
    /// What has been read: as units say.
    pub(super) credits: &'a [u32],
}

/// A put of units, as who polls them learns of it.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) tag: Tag,
    /// The poster's component and its event.
    pub(super) poster: (u32, u32),
    /// What the poster knew to have been read by then, by itself or by others.
    pub(super) credits: Clock,
}

/// Bytes with the same history.
#[derive(Clone, Debug)]
struct Piece {
    end: u64,
    write: Option<Mark>,
    /// Reads since the write, the last of each component.
    reads: Vec<Mark>,
    /// The put of units that wrote last, if one did.
    units: Option<Rc<Posted>>,
    /// Whether they were polled and had come: so the write came before these reads.
    come: bool,
}

impl Piece {
    const fn new(end: u64) -> Self {
        Self { end, write: None, reads: Vec::new(), units: None, come: false }
    }

    /// Adds an access by someone who knows so much, or returns one that it is not ordered after.
    fn touch(&mut self, mark: &Mark, knows: Knowledge<'_>) -> Result<(), Mark> {
        // Who overwrites units that were polled comes after those polls.
        let behind = mark.kind.writes() && self.come;
        if let Some(write) = self.write.filter(|write| !behind && !write.known_to(knows.clock)) {
            return Err(write);
        }
        if !mark.kind.writes() {
            self.add_read(mark);
            return Ok(());
        }
        let unread = |read: &&Mark| !read.known_to(knows.clock) && !read.known_to(knows.credits);
        if let Some(read) = self.reads.iter().find(unread) {
            return Err(*read);
        }
        self.write = Some(*mark);
        self.reads.clear();
        self.units = None;
        self.come = false;
        Ok(())
    }

    /// Adds a poll that found units of `tag`, or none.
    fn poll(&mut self, mark: &Mark, tag: Option<Tag>, knows: Knowledge<'_>) -> Result<(), Mark> {
        let unknown = self.write.filter(|write| !write.known_to(knows.clock));
        match (&self.units, tag, unknown) {
            // Other bytes than units, on their way; or older units, which are about to be overwritten.
            (None, _, Some(write)) => return Err(write),
            (Some(units), Some(tag), _) if tag != units.tag => return self.write.map_or(Ok(()), Err),
            (Some(_), Some(_), _) => self.come = true,
            // A poll that finds nothing may meet what it waits for.
            (_, None, _) => return Ok(()),
            (None, Some(_), None) => {}
        }
        self.add_read(mark);
        Ok(())
    }

    fn add_read(&mut self, mark: &Mark) {
        match self.reads.iter_mut().find(|read| read.component == mark.component) {
            Some(read) => *read = *mark,
            None => self.reads.push(*mark),
        }
    }
}

/// The history of one window. Pieces are split where accesses begin and end and are never merged: a protocol touches
/// the same ranges again and again.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    pieces: BTreeMap<u64, Piece>,
}

impl Shadow {
    /// Adds an access by someone who knows so much, or returns one that it is not ordered after.
    pub(super) fn touch(&mut self, mark: &Mark, knows: Knowledge<'_>) -> Result<(), Mark> {
        self.each(mark.span, |piece| piece.touch(mark, knows))
    }

    /// Adds a put of units.
    pub(super) fn put_units(&mut self, mark: &Mark, units: &Rc<Posted>, knows: Knowledge<'_>) -> Result<(), Mark> {
        self.each(mark.span, |piece| {
            piece.touch(mark, knows)?;
            piece.units = Some(Rc::clone(units));
            Ok(())
        })
    }

    /// Adds a poll that found units of `tag`, or none; `heard` gets the puts that it has found.
    pub(super) fn poll(
        &mut self,
        mark: &Mark,
        tag: Option<Tag>,
        knows: Knowledge<'_>,
        heard: &mut Vec<Rc<Posted>>,
    ) -> Result<(), Mark> {
        self.each(mark.span, |piece| {
            piece.poll(mark, tag, knows)?;
            heard.extend(piece.units.clone().filter(|_| tag.is_some()));
            Ok(())
        })
    }

    /// Does something to all pieces of a range.
    fn each(&mut self, span: Span, mut act: impl FnMut(&mut Piece) -> Result<(), Mark>) -> Result<(), Mark> {
        let (start, end) = (span.offset.0, span.end());
        if !self.pieces.contains_key(&start) {
            self.split(start);
        }
        let mut at = start;
        while at < end {
            match self.pieces.get_mut(&at) {
                Some(piece) if piece.end <= end => {
                    act(piece)?;
                    at = piece.end;
                }
                Some(_) => self.split(end),
                None => {
                    let next = self.pieces.range(at..end).next().map_or(end, |(&next, _)| next);
                    self.pieces.insert(at, Piece::new(next));
                }
            }
        }
        Ok(())
    }

    /// Cuts the piece around `at` in two, if there is one.
    fn split(&mut self, at: u64) {
        if let Some((_, piece)) = self.pieces.range_mut(..at).next_back().filter(|(_, piece)| piece.end > at) {
            let right = piece.clone();
            piece.end = at;
            self.pieces.insert(at, right);
        }
    }
}
