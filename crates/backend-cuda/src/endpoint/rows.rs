//! Rows and arrays in a GPU's memory.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use ep_core::engine::{Arena, Extent, Lease, Scalar};
use ep_core::layout::{Block, RowFormat};
use ep_core::machine::Window;
use ep_core::port::{Offset, Span};
use ep_core::{Error, Fault, Phase, Rank};
use zerocopy::IntoBytes;

use crate::driver::{Scratch, Stream};
use crate::node::Node;

/// Copying access to the own window, or to the block of it that a lease holds, on the rank's stream.
#[derive(Clone, Debug)]
pub struct DeviceWindow {
    pub(crate) stream: Arc<Stream>,
    pub(crate) node: Arc<Node>,
    /// What may be touched: elsewhere an arena may have no memory.
    pub(crate) within: Span,
    pub(crate) me: Rank,
    /// The endpoint's, and one of each lease.
    pub(crate) leased: Arc<()>,
}

impl DeviceWindow {
    /// The same within a block.
    pub(crate) fn of(&self, block: &Block) -> Self {
        Self { within: block.span(), ..self.clone() }
    }

    /// Whether somebody else has it: somebody who has results that lie there.
    pub(crate) fn is_leased(&self) -> bool {
        Arc::strong_count(&self.leased) > 1
    }

    /// Where byte `at` lies.
    pub(crate) fn address(&self, at: Offset) -> u64 {
        self.node.address(self.me) + at.0
    }

    fn check(&self, span: Span) -> Result<u64, Fault> {
        match span.offset.0.checked_add(span.len) {
            Some(end) if self.within.offset <= span.offset && end <= self.within.end() => Ok(self.address(span.offset)),
            _ => Err(Fault::out_of_range(span, self.within.end())),
        }
    }

    /// The own GPU does not answer.
    const fn gone(&self) -> Fault {
        Fault::PeerGone { peer: self.me, phase: Phase::Rows }
    }
}

impl Window for DeviceWindow {
    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        let at = self.check(from.span(into.len() as u64))?;
        // SAFETY: the range lies in the own window, which `node` keeps, and has memory: that of a block that is held, or what an endpoint
        // names, which alone has all of the window.
        unsafe { self.stream.download(at, into) }.map_err(|_| self.gone())
    }

    fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        let at = self.check(to.span(bytes.len() as u64))?;
        // SAFETY: as in `read`.
        unsafe { self.stream.upload(at, bytes) }.map_err(|_| self.gone())
    }
}

/// `[rows, hidden]` rows in a GPU's memory, each at a multiple of 16 bytes.
pub enum Rows {
    /// Anywhere.
    Owned(Owned),
    /// In the arena of the own window.
    Leased(Lease<DeviceWindow>),
    /// FP8 rows of a dispatch whose scales lie elsewhere.
    Apart(Apart),
}

/// Rows in memory of their own, with room for all of them.
#[derive(Debug)]
pub struct Owned {
    /// Shared with operations under way that may read it.
    memory: Arc<Scratch>,
    rows: u32,
    row_bytes: usize,
}

impl Owned {
    /// `rows` rows of `row_bytes` bytes that carry data, in `memory`, which has room for them.
    pub(super) const fn new(memory: Arc<Scratch>, rows: u32, row_bytes: usize) -> Self {
        Self { memory, rows, row_bytes }
    }

    /// The memory.
    pub const fn memory(&self) -> &Arc<Scratch> {
        &self.memory
    }
}

/// FP8 rows of a dispatch: codes, and scales in memory of their own.
#[derive(Debug)]
pub struct Apart {
    codes: Arc<Scratch>,
    scales: Arc<Scratch>,
    strides: ScaleStrides,
    rows: u32,
    format: RowFormat,
}

impl Apart {
    pub(super) fn new(
        format: &RowFormat,
        codes: Arc<Scratch>,
        scales: Arc<Scratch>,
        strides: ScaleStrides,
        rows: u32,
    ) -> Self {
        Self { codes, scales, strides, rows, format: *format }
    }

    /// What codes and scales lie in.
    pub(super) fn memory(&self) -> [Arc<Scratch>; 2] {
        [Arc::clone(&self.codes), Arc::clone(&self.scales)]
    }

    /// Copies a row, as it travels, in.
    fn write(&self, row: u64, bytes: &[u8]) -> Result<(), Error> {
        let Self { codes, scales, strides, format, .. } = self;
        codes.write((row * format.codes_stride()) as usize, &bytes[..format.codes_bytes() as usize])?;
        for (number, word) in (0u64..).zip(bytes[format.scales_offset() as usize..].chunks(4)) {
            scales.write((row * strides.row + number * strides.word) as usize, word)?;
        }
        Ok(())
    }
}

/// How scales of their own lie: in words of 4 bytes, an f32 or four UE8M0 bytes each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScaleStrides {
    /// Bytes from one row's scales to the next's, a multiple of 4.
    pub row: u64,
    /// Bytes from one word to the next, a multiple of 4.
    pub word: u64,
}

impl ScaleStrides {
    /// Of rows' scales `row` bytes apart, each side by side.
    pub(super) const fn dense(row: u64) -> Self {
        Self { row, word: 4 }
    }
}

/// From one row to the next.
pub(crate) const fn stride(row_bytes: usize) -> usize {
    row_bytes.saturating_add(15) / 16 * 16
}

impl Rows {
    pub(crate) fn new(stream: &Arc<Stream>, rows: u32, row_bytes: usize) -> Result<Self, Error> {
        let memory = Arc::new(Scratch::of(stream, rows as usize, stride(row_bytes))?);
        Ok(Self::Owned(Owned { memory, rows, row_bytes }))
    }

    /// Room for `rows` rows that a dispatch brings.
    pub(crate) fn landing(stream: &Arc<Stream>, rows: u32, format: &RowFormat) -> Result<Self, Error> {
        if format.scales_bytes() == 0 {
            return Self::new(stream, rows, format.payload_bytes() as usize);
        }
        let room = |stride: u64| Scratch::of(stream, rows as usize, stride as usize).map(Arc::new);
        let (codes, scales) = (room(format.codes_stride())?, room(format.scales_stride())?);
        Ok(Self::Apart(Apart::new(format, codes, scales, ScaleStrides::dense(format.scales_stride()), rows)))
    }

    pub(crate) fn from_bytes(stream: &Arc<Stream>, bytes: &[u8], rows: u32, row_bytes: usize) -> Result<Self, Error> {
        if Some(bytes.len()) != (rows as usize).checked_mul(row_bytes) {
            let limit = format_args!("{rows} rows of {row_bytes} bytes");
            return Err(Error::invalid("length of the rows in bytes", bytes.len(), limit));
        }
        let memory = Arc::new(Scratch::from_bytes(stream, &spread(bytes, row_bytes))?);
        Ok(Self::Owned(Owned { memory, rows, row_bytes }))
    }

    /// Rows it has room for.
    pub fn rows(&self) -> u32 {
        match self {
            Self::Owned(owned) => owned.rows,
            Self::Leased(lease) => lease.rows(),
            Self::Apart(apart) => apart.rows,
        }
    }

    /// Bytes of a row that carry data, as it travels.
    pub fn row_bytes(&self) -> usize {
        match self {
            Self::Owned(owned) => owned.row_bytes,
            Self::Leased(lease) => lease.row_bytes(),
            Self::Apart(apart) => apart.format.payload_bytes() as usize,
        }
    }

    /// Of rows whose scales do not follow their codes.
    fn format_apart(&self) -> Option<RowFormat> {
        match self {
            Self::Owned(_) => None,
            Self::Leased(lease) => Some(*lease.place().1.format()).filter(|format| format.scales_bytes() > 0),
            Self::Apart(apart) => Some(apart.format),
        }
    }

    /// What a desk checks of them.
    pub(crate) fn extent(&self) -> Extent {
        Extent { rows: self.rows(), row_bytes: self.row_bytes(), are_apart: self.are_apart() }
    }

    /// Whether the rows' scales lie apart from their codes: FP8 rows that a dispatch brought, or of a caller's.
    pub fn are_apart(&self) -> bool {
        self.format_apart().is_some()
    }

    /// From one row to the next, in bytes; of their codes, where scales lie apart.
    pub fn stride(&self) -> usize {
        self.format_apart().map_or_else(|| stride(self.row_bytes()), |format| format.codes_stride() as usize)
    }

    /// Where the scales of rows of `format` lie, and how; address 0 where there are none.
    pub(crate) fn scales(&self, format: &RowFormat, arena: &Arena, window: &DeviceWindow) -> (u64, ScaleStrides) {
        if format.scales_bytes() == 0 {
            return (0, ScaleStrides::dense(0));
        }
        match self {
            Self::Owned(Owned { memory, .. }) => {
                (memory.address() + format.scales_offset(), ScaleStrides::dense(self.stride() as u64))
            }
            Self::Leased(lease) => {
                let first = lease.block_in(arena).map_or(0, |block| window.address(block.scales(0).offset));
                (first, ScaleStrides::dense(format.scales_stride()))
            }
            Self::Apart(apart) => (apart.scales.address(), apart.strides),
        }
    }

    /// Where the first row lies, or its codes.
    pub(crate) fn address(&self, arena: &Arena, window: &DeviceWindow) -> u64 {
        match self {
            Self::Owned(owned) => owned.memory.address(),
            Self::Leased(lease) => lease.block_in(arena).map_or(0, |block| window.address(block.codes(0).offset)),
            Self::Apart(apart) => apart.codes.address(),
        }
    }

    /// Its memory, to be kept by a graph.
    pub(crate) fn memory(&self) -> Arc<dyn Any + Send + Sync> {
        match self {
            Self::Owned(owned) => Arc::clone(&owned.memory) as _,
            Self::Leased(lease) => Arc::clone(lease.held()) as _,
            Self::Apart(apart) => Arc::new((Arc::clone(&apart.codes), Arc::clone(&apart.scales))) as _,
        }
    }

    /// The lease, where the rows lie in the window.
    pub(crate) const fn lease(&self) -> Option<&Lease<DeviceWindow>> {
        match self {
            Self::Owned(_) | Self::Apart(_) => None,
            Self::Leased(lease) => Some(lease),
        }
    }

    /// Refuses rows that kernels of the endpoint with this arena, whose stream is `stream`, must not read or write.
    ///
    /// # Errors
    /// [`Error::Invalid`]: they lie in another window, on another GPU, or in memory that another stream may give back meanwhile.
    pub(crate) fn check_home(&self, what: &str, arena: &Arena, stream: &Arc<Stream>) -> Result<(), Error> {
        let is_here = |memory: &Arc<Scratch>| Arc::ptr_eq(memory.stream(), stream);
        let is_own = match self {
            Self::Owned(owned) => is_here(&owned.memory),
            Self::Leased(lease) => lease.rows() == 0 || lease.block_in(arena).is_some(),
            Self::Apart(apart) => is_here(&apart.codes) && is_here(&apart.scales),
        };
        if is_own { Ok(()) } else { Err(Error::invalid(what, "of another endpoint", "one of this endpoint")) }
    }

    /// All rows, dense, each as it travels.
    pub(crate) fn to_vec(&self, arena: &Arena, window: &DeviceWindow) -> Result<Vec<u8>, Error> {
        let fault = |fault: Fault| Error::invalid("rows to copy", self.rows(), fault);
        let mut padded = vec![0; self.rows() as usize * self.stride()];
        match self {
            Self::Owned(owned) => owned.memory.read(0, &mut padded)?,
            Self::Apart(apart) => apart.codes.read(0, &mut padded)?,
            Self::Leased(lease) => {
                let (window, block) = lease.place();
                window.read(block.codes(0).offset, &mut padded).map_err(fault)?;
            }
        }
        let rows = padded.chunks_exact(self.stride());
        let row_bytes = self.row_bytes();
        let Some(format) = self.format_apart().filter(|_| self.rows() > 0) else {
            return Ok(rows.flat_map(|row| &row[..row_bytes]).copied().collect());
        };
        let strides = self.scales(&format, arena, window).1;
        let [row, word] = [strides.row, strides.word].map(|stride| stride as usize);
        let words = (format.scales_stride() / 4) as usize;
        let mut scales = vec![0; (rows.len() - 1) * row + (words - 1) * word + 4];
        match self {
            Self::Owned(_) => {}
            Self::Apart(apart) => apart.scales.read(0, &mut scales)?,
            Self::Leased(lease) => {
                let (window, block) = lease.place();
                window.read(block.scales(0).offset, &mut scales).map_err(fault)?;
            }
        }
        let mut dense = vec![0; rows.len() * row_bytes];
        for (at, (codes, into)) in rows.zip(dense.chunks_exact_mut(row_bytes)).enumerate() {
            let (front, back) = into.split_at_mut(format.scales_offset() as usize);
            let count = format.codes_bytes() as usize;
            front[..count].copy_from_slice(&codes[..count]);
            for (number, into) in back.chunks_mut(4).enumerate() {
                into.copy_from_slice(&scales[at * row + number * word..][..into.len()]);
            }
        }
        Ok(dense)
    }

    /// Copies dense rows, each as it travels, in, from row `first` on.
    pub(crate) fn store(&mut self, first: u32, bytes: &[u8]) -> Result<(), Error> {
        let (size, room) = (self.row_bytes(), self.rows());
        if size == 0 || !bytes.len().is_multiple_of(size) {
            let limit = format_args!("a multiple of {size}");
            return Err(Error::invalid("length of the rows in bytes", bytes.len(), limit));
        }
        let last = first as usize + bytes.len() / size;
        if last > room as usize {
            return Err(Error::invalid(
                "last row to store",
                last,
                format_args!("at most the {room} rows of the buffer"),
            ));
        }
        match self {
            Self::Owned(Owned { memory, row_bytes, .. }) => {
                Ok(memory.write(first as usize * stride(*row_bytes), &spread(bytes, *row_bytes))?)
            }
            Self::Leased(lease) => {
                for (row, bytes) in (first..).zip(bytes.chunks_exact(size)) {
                    lease.write(row, bytes).map_err(|fault| Error::invalid("row to store", row, fault))?;
                }
                Ok(())
            }
            Self::Apart(apart) => {
                for (row, bytes) in (u64::from(first)..).zip(bytes.chunks_exact(size)) {
                    apart.write(row, bytes)?;
                }
                Ok(())
            }
        }
    }
}

/// Dense rows with padding between them.
fn spread(bytes: &[u8], row_bytes: usize) -> Vec<u8> {
    let stride = stride(row_bytes);
    if stride == row_bytes {
        return bytes.to_vec();
    }
    let mut padded = vec![0; bytes.len() / row_bytes.max(1) * stride];
    for (to, from) in padded.chunks_exact_mut(stride).zip(bytes.chunks_exact(row_bytes)) {
        to[..row_bytes].copy_from_slice(from);
    }
    padded
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows")
            .field("rows", &self.rows())
            .field("row_bytes", &self.row_bytes())
            .field("leased", &self.lease().is_some())
            .finish()
    }
}

/// Numbers in a GPU's memory.
#[derive(Debug)]
pub struct Array<T> {
    memory: Arc<Scratch>,
    len: usize,
    of: PhantomData<T>,
}

impl<T> Clone for Array<T> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), len: self.len, of: PhantomData }
    }
}

impl<T: Scalar> Array<T> {
    pub(crate) const fn of_memory(memory: Arc<Scratch>, len: usize) -> Self {
        Self { memory, len, of: PhantomData }
    }

    /// Room for `len` numbers, undefined.
    pub(crate) fn new(stream: &Arc<Stream>, len: usize) -> Result<Self, Error> {
        Ok(Self { memory: Arc::new(Scratch::of(stream, len, size_of::<T>())?), len, of: PhantomData })
    }

    pub(crate) fn from_values(stream: &Arc<Stream>, values: &[T]) -> Result<Self, Error> {
        let memory = Arc::new(Scratch::from_bytes(stream, values.as_bytes())?);
        Ok(Self { memory, len: values.len(), of: PhantomData })
    }

    /// Its first `len` numbers.
    pub(crate) fn first(&self, len: usize) -> Self {
        Self { len: len.min(self.len), ..self.clone() }
    }

    /// Writes `values` over all of it. Waits for the endpoint's stream.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another number of values.
    pub fn write(&self, values: &[T]) -> Result<(), Error> {
        if values.len() != self.len {
            return Err(Error::invalid("values to write", values.len(), format_args!("{}", self.len)));
        }
        Ok(self.memory.write(0, values.as_bytes())?)
    }

    /// Fills all of it with a byte, enqueued.
    ///
    /// # Safety
    /// As [`Scratch::fill`].
    pub(crate) unsafe fn fill(&self, byte: u8) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        Ok(unsafe { self.memory.fill(byte) }?)
    }

    /// Refuses an array that kernels on `stream` must not read or write.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is on another GPU, or in memory that another stream may give back meanwhile.
    pub(crate) fn check_home(&self, what: &str, stream: &Arc<Stream>) -> Result<(), Error> {
        if self.len == 0 || Arc::ptr_eq(self.memory.stream(), stream) {
            return Ok(());
        }
        Err(Error::invalid(what, "of another endpoint", "one of this endpoint"))
    }

    pub(crate) fn to_vec(&self) -> Result<Vec<T>, Error> {
        let mut values = vec![T::new_zeroed(); self.len];
        let mut bytes = vec![0; self.len * size_of::<T>()];
        self.memory.read(0, &mut bytes)?;
        for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(size_of::<T>())) {
            if let Ok(read) = T::read_from_bytes(bytes) {
                *value = read;
            }
        }
        Ok(values)
    }

    /// Its memory, to be kept by a graph.
    pub(crate) fn memory(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.memory) as _
    }

    /// Numbers in it.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it lies in somebody else's memory.
    pub(crate) fn is_foreign(&self) -> bool {
        self.memory.is_foreign()
    }

    /// Whether it holds none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it lies.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}
