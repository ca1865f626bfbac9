// SPDX-License-Identifier: Apache-2.0
//! `pagetide host`, as a client of the daemon.

use super::cli::{BudgetArgs, HostCommand};
use super::{BudgetBody, BudgetSetting, HostReport};
use crate::command::Call;
use crate::scheduler;
use hyper::Method;
use pagetide_report::outcome::CommandError;

const HOST: &str = "/v1/host";
const BUDGET: &str = "/v1/host/budget";

/// Executes a command about the host.
pub(crate) fn host(command: HostCommand) -> Result<(), CommandError> {
    match command {
        HostCommand::Show { client } => Call {
            client: &client,
            method: Method::GET,
            path: HOST.into(),
        }
        .ask::<HostReport>(),
        HostCommand::Budget(args) => budget(&args),
        HostCommand::Scheduler(args) => scheduler::command::execute(&args),
    }
}

fn budget(args: &BudgetArgs) -> Result<(), CommandError> {
    let call = |method, path: &str| Call {
        client: &args.client,
        method,
        path: path.into(),
    };
    let budget_bytes = match args.budget {
        Some(BudgetSetting::Size(size)) => Some(size.0),
        Some(BudgetSetting::Off) | None => None,
    };
    let body = BudgetBody {
        budget_bytes,
        min: args.min,
        low: args.low,
        high: args.high,
        pace_bytes: args.pace.map(|size| size.0),
    };
    match args.budget {
        Some(BudgetSetting::Off) if body != BudgetBody::default() => Err(CommandError::refused(
            "watermarks and a pace mean nothing without a budget: write either off or those",
        )),
        Some(BudgetSetting::Off) => call(Method::DELETE, BUDGET).ask::<HostReport>(),
        None if body == BudgetBody::default() => call(Method::GET, HOST).ask::<HostReport>(),
        Some(BudgetSetting::Size(_)) | None => {
            call(Method::PUT, BUDGET).make::<_, HostReport>(Some(&body))
        }
    }
}
