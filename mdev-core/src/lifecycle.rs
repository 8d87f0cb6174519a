//! The states of a vGPU, and the ways between them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a vGPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VgpuState {
    /// Only its definition exists.
    Defined,
    /// Admitted to the GPU; its worker is being started.
    Starting,
    /// Its socket is ready; no VM is attached.
    Active,
    /// A VM is attached.
    InUse,
    /// Its worker or its GPU died. A worker that is left only tells its VM so.
    Failed,
    /// It is being taken down.
    Stopping,
}

impl VgpuState {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Defined, Self::Starting, Self::Active, Self::InUse, Self::Failed, Self::Stopping];

    /// True where the vGPU holds a partition of its parent.
    pub const fn holds_gpu(self) -> bool {
        matches!(self, Self::Starting | Self::Active | Self::InUse | Self::Stopping)
    }

    /// True where a VM may attach, or is attached.
    pub const fn is_running(self) -> bool {
        matches!(self, Self::Active | Self::InUse)
    }

    const fn may_become(self, next: Self) -> bool {
        use VgpuState::{Active, Defined, Failed, InUse, Starting, Stopping};
        match self {
            Defined => matches!(next, Starting),
            Starting => matches!(next, Active | Failed | Stopping),
            Active => matches!(next, InUse | Failed | Stopping),
            InUse => matches!(next, Active | Failed | Stopping),
            Failed => matches!(next, Starting | Stopping | Defined),
            Stopping => matches!(next, Defined | Failed),
        }
    }
}

impl fmt::Display for VgpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Defined => "defined",
            Self::Starting => "starting",
            Self::Active => "active",
            Self::InUse => "in use",
            Self::Failed => "failed",
            Self::Stopping => "stopping",
        })
    }
}

/// A step that there is no way for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("A vGPU that is {from} cannot become {to}")]
pub struct TransitionError {
    /// Where it is.
    pub from: VgpuState,
    /// Where it was to go.
    pub to: VgpuState,
}

/// The state of one vGPU. It has one owner, who alone moves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifecycle(VgpuState);

impl Lifecycle {
    /// A vGPU that is not running.
    pub const fn defined() -> Self {
        Self(VgpuState::Defined)
    }

    /// A vGPU whose worker was found running, by a manager that is new.
    pub const fn adopted(vm_attached: bool) -> Self {
        Self(if vm_attached { VgpuState::InUse } else { VgpuState::Active })
    }

    /// Where it is.
    pub const fn state(self) -> VgpuState {
        self.0
    }

    /// Moves it, or says why not. To stay is not a step.
    pub fn advance(&mut self, to: VgpuState) -> Result<(), TransitionError> {
        if !self.0.may_become(to) {
            return Err(TransitionError { from: self.0, to });
        }
        self.0 = to;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vgpu_is_used_by_one_vm_after_another() {
        let mut vgpu = Lifecycle::defined();
        for to in [
            VgpuState::Starting,
            VgpuState::Active,
            VgpuState::InUse,
            VgpuState::Active,
            VgpuState::InUse,
            VgpuState::Stopping,
            VgpuState::Defined,
        ] {
            vgpu.advance(to).unwrap();
        }
    }

    #[test]
    fn races_become_refusals() {
        let mut vgpu = Lifecycle::adopted(true);
        vgpu.advance(VgpuState::Stopping).unwrap();
        let error = vgpu.advance(VgpuState::InUse).unwrap_err();
        assert_eq!(error.to_string(), "A vGPU that is stopping cannot become in use");
        assert_eq!(vgpu.state(), VgpuState::Stopping);
    }

    #[test]
    fn whatever_holds_the_gpu_can_be_stopped_or_fail_and_then_start_again() {
        for state in VgpuState::ALL.into_iter().filter(|state| state.holds_gpu()) {
            assert!(state.may_become(VgpuState::Failed), "{state}");
            assert!(state == VgpuState::Stopping || state.may_become(VgpuState::Stopping));
        }
        assert!(VgpuState::Failed.may_become(VgpuState::Starting));
        assert!(VgpuState::ALL.into_iter().all(|state| !state.may_become(state)));
    }
}
