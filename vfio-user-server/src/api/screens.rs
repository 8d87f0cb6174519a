//! Physical screens: who is on them.

use axum::Json;
use axum::extract::{Path, State};
use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::request::{Body, Named, Refusal};
use super::service::Api;
use crate::manager::Result;

/// A physical GPU's own screen, on which one vGPU at a time is seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PhysicalScreen {
    /// The physical GPU.
    pub parent: String,
    /// Who is on it. It is dark while nobody is, or while that vGPU has no picture.
    #[schema(value_type = Option<String>, format = "uuid")]
    pub focus: Option<VgpuId>,
    /// How long each vGPU is shown, while they take turns.
    pub rotate_seconds: Option<u64>,
}

/// A vGPU that was put on its parent's screen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Focused {
    /// The physical GPU.
    pub parent: String,
    /// Who is on its screen now.
    #[schema(value_type = String, format = "uuid")]
    pub focus: VgpuId,
    /// How long it took to program the screen, in microseconds.
    pub switch_us: u64,
}

/// `POST /v1/parents/{parent}/rotation`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rotate {
    /// How long each vGPU is shown: 1 to 86400. Absent: whoever is on the screen stays there.
    #[serde(default)]
    pub seconds: Option<u64>,
}

/// Puts a vGPU on its parent's physical screen. It stays there, and a rotation ends, for good.
#[utoipa::path(
    post,
    path = "/v1/vgpus/{uuid}/focus",
    params(("uuid" = String, Path)),
    responses((status = 200, body = Focused, description = "It is on the screen"), Refusal)
)]
pub async fn focus(State(api): State<Api>, Named(id): Named) -> Result<Json<Focused>> {
    Ok(Json(api.ask(move |manager| manager.focus(id)).await?))
}

/// Shows the vGPUs of a parent on its physical screen in turn, or ends that: at once, and for later managers. Those
/// without a picture are passed over.
#[utoipa::path(
    post,
    path = "/v1/parents/{parent}/rotation",
    params(("parent" = String, Path)),
    request_body = Rotate,
    responses((status = 200, body = PhysicalScreen, description = "The screen as it is now"), Refusal)
)]
pub async fn rotate(
    State(api): State<Api>,
    Path(parent): Path<String>,
    Body(Rotate { seconds }): Body<Rotate>,
) -> Result<Json<PhysicalScreen>> {
    Ok(Json(api.ask(move |manager| manager.rotate(&parent, seconds)).await?))
}
