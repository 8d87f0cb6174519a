//! The vGPU's state in vfio-user's migration messages.

use mdev_core::device::{Incoming, Outgoing};
use mdev_core::stream::Head;
use vfio_user_server::errno::Errno;
use vfio_user_server::migration::{Migration, MigrationState};

use super::function::Function;

/// What a client reads or writes of a saved vGPU.
#[derive(Debug, Default)]
pub enum Transfer {
    /// Nothing.
    #[default]
    None,
    /// The client reads the vGPU's stream.
    Outgoing(Box<Outgoing>),
    /// The client writes a stream into the vGPU.
    Incoming(Box<Incoming>),
}

impl Migration for Function {
    fn step(&mut self, from: MigrationState, to: MigrationState) -> Result<(), Errno> {
        use MigrationState as S;
        match (from, to) {
            (S::Running, S::Stop) => self.inner_mut().pause().map_err(|error| {
                log::warn!("The VM cannot be saved: {error}");
                Errno::EBUSY
            })?,
            (S::Stop, S::Running) => self.inner_mut().resume().map_err(refused)?,
            (S::Stop, S::StopCopy) => {
                let head = self.head();
                let outgoing = Outgoing::new(self.inner_mut(), &head).map_err(refused)?;
                self.transfer = Transfer::Outgoing(Box::new(outgoing));
            }
            (S::Stop, S::Resuming) => self.transfer = Transfer::Incoming(Box::default()),
            (S::Resuming, S::Stop) => {
                let transfer = std::mem::take(&mut self.transfer);
                let complete = matches!(&transfer, Transfer::Incoming(it) if it.is_complete());
                if !complete {
                    self.inner_mut().discard();
                    return Err(Errno::EINVAL);
                }
            }
            _ => self.transfer = Transfer::None,
        }
        Ok(())
    }

    fn read(&mut self, data: &mut [u8]) -> Result<usize, Errno> {
        let mut transfer = std::mem::take(&mut self.transfer);
        let Transfer::Outgoing(outgoing) = &mut transfer else {
            self.transfer = transfer;
            return Err(Errno::EINVAL);
        };
        let read = outgoing.read(self.inner_mut(), data);
        self.transfer = transfer;
        Ok(read?)
    }

    fn write(&mut self, data: &[u8]) -> Result<(), Errno> {
        let mut transfer = std::mem::take(&mut self.transfer);
        let Transfer::Incoming(incoming) = &mut transfer else { return Err(Errno::EINVAL) };
        let mdev_type = self.mdev_type().to_owned();
        incoming.write(self.inner_mut(), &mdev_type, data).map_err(|error| {
            self.inner_mut().discard();
            refused(error)
        })?;
        self.transfer = transfer;
        Ok(())
    }
}

fn refused(error: impl std::fmt::Display) -> Errno {
    log::warn!("The vGPU is not saved or restored: {error}");
    Errno::EINVAL
}

impl Function {
    fn head(&mut self) -> Head {
        let spec = self.inner_mut().client().spec().clone();
        Head {
            tessera: env!("CARGO_PKG_VERSION").to_owned(),
            vgpu: spec.vgpu,
            mdev_type: self.mdev_type().to_owned(),
            vram_bytes: spec.vram_bytes,
            place: None,
        }
    }
}
