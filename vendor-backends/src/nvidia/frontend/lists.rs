//! Queries that are answered with lists: of data behind a pointer, and of times.

use std::time::{SystemTime, UNIX_EPOCH};

use mdev_core::gpu::Client;
use nvidia_rm::abi::TimeCorrelation;
use nvidia_rm::controls;
use nvidia_rm::numbers::status;
use nvidia_rm::table::find;

use super::NvidiaFrontEnd;
use super::call::{Call, Stop};
use super::control::{Control, WRONG_LENGTH};

/// Length of an element: index and data, in bytes.
const ELEMENT: usize = 8;

/// Kind of clock in [`TimeCorrelation`]: the host's time of day, in microseconds.
const TIME_OF_DAY: u8 = 1;

impl NvidiaFrontEnd {
    /// Answers the first version of a query, which has a pointer to a list of indices and data. In
    /// the second version, `command`, the list is in the parameters.
    pub(super) fn list_behind_pointer(
        &self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
        command: u32,
        (count, address): (u32, u64),
    ) -> Result<(), Stop> {
        let count = count as usize;
        let row = find(controls::ROWS, command);
        let form = row.and_then(|row| row.form(self.layout.series)).ok_or(WRONG_LENGTH)?;
        // The list is behind its count, and may have the route behind it.
        if count > (form.route.unwrap_or(form.bytes) - size_of::<u32>()) / ELEMENT {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        if count == 0 {
            return Ok(());
        }
        let list = call.block(address, count * ELEMENT)?;
        let mut params = (count as u32).to_le_bytes().to_vec();
        params.extend(list);
        params.resize(form.bytes, 0);
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
        control: &mut Control,
    ) -> Result<(), Stop> {
        match self.query(gpu, controls::TIME_CORRELATION, &mut control.params) {
            Some(status::OK) => return Ok(()),
            Some(status) => return Err(Stop::Status(status)),
            None => {}
        }
        let mut params: TimeCorrelation = control.read();
        let count = usize::from(params.count);
        if params.clock != TIME_OF_DAY || count > params.samples.len() {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        for sample in params.samples.iter_mut().take(count) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            *sample = [now.as_micros() as u64, now.as_nanos() as u64];
        }
        control.write(&params);
        Ok(())
    }
}
