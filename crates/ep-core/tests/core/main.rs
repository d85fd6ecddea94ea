//! The pure parts of the protocol, and what kernels get of them: properties, and the C text against the Rust code.

mod c_header;
mod c_protocol;
mod common;
mod int8;
mod layout;
mod modules;
mod plan;
mod quant;
mod ring;
mod room;
