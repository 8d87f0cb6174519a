//! Queries that are answered with lists: of data behind a pointer, and of times.

use std::time::{SystemTime, UNIX_EPOCH};

use mdev_core::gpu::Client;

use super::FrontEnd;
use super::call::{Call, Stop, get_u32, get_u64, put_u64};
use super::control::WRONG_LENGTH;
use crate::nvidia::sys::numbers::{control, status};

/// Length of an element: index and data, in bytes.
const ELEMENT: usize = 8;

/// Returns the length of the parameters of the second version of a query in bytes, and that of what
/// is behind the list.
fn list_params(command: u32, series: u16) -> (usize, usize) {
    let gr_info = match series {
        ..560 => 472,
        560..590 => 488,
        590.. => 496,
    };
    if command == control::GR_INFO { (gr_info, 16) } else { (420, 0) }
}

/// Lists of clock samples (`NV2080_CTRL_TIMER_GET_GPU_CPU_TIME_CORRELATION_INFO_PARAMS`).
mod samples {
    /// Maximum number.
    pub const MAX: usize = 16;
    /// Offset of the first, and the length of one.
    pub const FIRST: usize = 8;
    pub const LEN: usize = 16;
    /// Kind of clock: the host's time of day, in microseconds.
    pub const TIME_OF_DAY: u8 = 1;
}

impl FrontEnd {
    /// Answers the first version of a query, which has a pointer to a list of indices and data. In
    /// the second version, `command`, the list is in the parameters.
    pub(super) fn list_behind_pointer(
        &self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
        command: u32,
        params: &[u8],
    ) -> Result<(), Stop> {
        let count = get_u32(params, 0).ok_or(WRONG_LENGTH)? as usize;
        let address = get_u64(params, 8).ok_or(WRONG_LENGTH)?;
        let (len, behind) = list_params(command, self.layout.series);
        if count > (len - behind - 4) / ELEMENT {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        if count == 0 {
            return Ok(());
        }
        let list = call.block(address, count * ELEMENT)?;
        let mut params = (count as u32).to_le_bytes().to_vec();
        params.extend(list);
        params.resize(len, 0);
        match self.query(gpu, command, &mut params) {
            Some(status::OK) => {
                params.truncate(4 + count * ELEMENT);
                params.drain(..4);
                call.write_block(address, params);
                Ok(())
            }
            Some(status) => Err(Stop::Status(status)),
            None => Err(Stop::Status(status::NOT_SUPPORTED)),
        }
    }

    /// `NV2080_CTRL_CMD_TIMER_GET_GPU_CPU_TIME_CORRELATION_INFO`: a GPU without a driver counts the
    /// time of day.
    pub(super) fn time_correlation(
        &self,
        gpu: &mut dyn Client,
        params: &mut [u8],
    ) -> Result<(), Stop> {
        match self.query(gpu, control::TIME_CORRELATION, params) {
            Some(status::OK) => return Ok(()),
            Some(status) => return Err(Stop::Status(status)),
            None => {}
        }
        let &[clock, count, ..] = &*params else { return Err(WRONG_LENGTH) };
        if clock != samples::TIME_OF_DAY || usize::from(count) > samples::MAX {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        for sample in 0..usize::from(count) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let at = samples::FIRST + sample * samples::LEN;
            put_u64(params, at, now.as_micros() as u64).ok_or(WRONG_LENGTH)?;
            put_u64(params, at + 8, now.as_nanos() as u64).ok_or(WRONG_LENGTH)?;
        }
        Ok(())
    }
}
