//! The queue's records, as the event loop uses them.

use std::sync::{Arc, Mutex};

use super::signals::{Orders, Signals};
use super::{Gate, Served, lock};
use crate::worker::journal::SharedRecorded;

/// Handle of the event loop to the records of the queue's thread.
#[derive(Clone, Debug)]
pub struct QueueRecords {
    /// What is recorded.
    pub recorded: SharedRecorded,
    pub(super) signals: Arc<Signals>,
    pub(super) served: Arc<Mutex<Served>>,
    pub(super) gate: Arc<Gate>,
    pub(super) is_held: bool,
}

impl QueueRecords {
    pub(super) fn new(signals: Arc<Signals>, served: Arc<Mutex<Served>>, gate: Arc<Gate>) -> Self {
        Self { recorded: SharedRecorded::default(), signals, served, gate, is_held: false }
    }

    /// Returns the orders for the thread.
    pub fn orders(&self) -> Orders {
        self.signals.orders()
    }

    /// Lets the thread look whether there is something to record.
    pub fn notify(&self) {
        self.signals.notify();
    }

    /// Holds the thread off, once it is between two requests, until [`Self::release`].
    pub fn hold(&mut self) {
        if !self.is_held {
            self.gate.hold();
            self.is_held = true;
            self.note_held(true);
        }
    }

    /// Lets the thread work again.
    pub fn release(&mut self) {
        if self.is_held {
            self.note_held(false);
            self.is_held = false;
            self.gate.release();
        }
    }

    /// Returns whether the thread is held off.
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    fn note_held(&self, held: bool) {
        if let Some(recorder) = &lock(&self.served).recorder {
            recorder.set_held(held);
        }
    }
}
