//! INT8 rows, made where the rows lie.

use std::sync::Arc;

use ep_core::layout::Kind;
use ep_core::{Element, Endpoint as _, Error};

use super::{AscendEndpoint, Rows};
use crate::args;
use crate::rank::Call;

impl AscendEndpoint {
    /// INT8 rows of the bf16 rows `x`, `[rows, hidden]`, as a dispatch takes them: those of [`ep_core::quant::int8`], bit for bit. It concerns
    /// no other rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] where rows of the shape are not INT8, or `x` is no bf16 rows of this endpoint; [`Error::Poisoned`] after a failure.
    pub async fn quantize(&mut self, x: &Rows) -> Result<Rows, Error> {
        self.desk.ready()?;
        if self.shape().element() != Element::Int8 {
            let limit = format_args!("{}", Element::Int8);
            return Err(Error::invalid("element of rows to quantise", self.shape().element(), limit));
        }
        self.desk.check_results("x", x.extent(), 0)?;
        let device = Arc::clone(self.device.device());
        x.check_home("x", &device)?;
        self.unused().await?;
        let out = Rows::new(&device, x.rows(), self.shape().row_bytes() as usize)?;
        // The launch is no operation: what kind it names is nobody's.
        let call = Call { kind: Kind::Dispatch, rings: self.layout().settings().rings(), alike: 0 };
        let args = args::Quantize {
            launch: self.device.prepared(&call, true),
            x: x.address(),
            x_stride: x.row_bytes() as u64,
            out: out.address(),
            out_stride: out.row_bytes() as u64,
            rows: x.rows(),
            reserved: 0,
        };
        self.keep([x.memory(), out.memory()]);
        self.launched();
        // SAFETY: rows of this device, as many and as long as the struct says, kept until the launch has ended. What this rank launched before has
        // ended.
        unsafe { self.device.quantize(&args) }?;
        self.finish().await?;
        Ok(out)
    }
}
