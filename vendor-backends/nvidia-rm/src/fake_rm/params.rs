//! Parameters of calls, with the size checks of the driver.

use std::mem::size_of;

use crate::numbers::status;
use zerocopy::FromBytes;

use super::objects::Refusal;

/// Reads parameters of exactly the size of `T`.
pub fn exact<T: FromBytes>(params: Option<&[u8]>) -> Result<T, Refusal> {
    T::read_from_bytes(params.unwrap_or_default()).map_err(|_| status::INVALID_PARAM_STRUCT)
}

/// Reads parameters of `len` bytes, the size in this driver's series, as the longest form `T`.
pub fn padded<T: FromBytes>(params: Option<&[u8]>, len: usize) -> Result<T, Refusal> {
    let params = params.filter(|params| params.len() == len);
    let mut bytes = params.ok_or(status::INVALID_PARAM_STRUCT)?.to_vec();
    bytes.resize(size_of::<T>(), 0);
    T::read_from_bytes(&bytes).map_err(|_| status::INVALID_PARAM_STRUCT)
}

/// Refuses parameters that do not have `len` bytes.
pub fn expect_size(params: &[u8], len: usize) -> Result<(), Refusal> {
    if params.len() == len { Ok(()) } else { Err(status::INVALID_PARAM_STRUCT) }
}

/// Writes parameters of exactly the size of `bytes`.
pub fn write_exact(params: &mut [u8], bytes: &[u8]) -> Result<(), Refusal> {
    expect_size(params, bytes.len())?;
    params.copy_from_slice(bytes);
    Ok(())
}
