package dispatch

import (
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/relay"
)

func jobOf(j relay.JobInfo) api.RelayJob {
	return api.RelayJob{ID: j.ID, DaemonID: j.DaemonID, Incarnation: j.Incarnation, State: j.State, StartedAt: j.StartedAt.UTC(),
		Deadline: j.Deadline.UTC(), Events: j.Events, QueuedBytes: j.QueuedBytes, SpillBytes: j.SpillBytes, Waiting: j.Waiting}
}

func daemonOf(d relay.DaemonInfo) api.RelayDaemon {
	jobs := d.Jobs
	if jobs == nil {
		jobs = []string{}
	}
	return api.RelayDaemon{ID: d.ID, Incarnation: d.Incarnation, Remote: d.Remote, Metadata: d.Metadata,
		ConnectedAt: d.ConnectedAt.UTC(), LastSeenAt: d.LastSeenAt.UTC(), Jobs: jobs, Fenced: d.Fenced}
}

func fenceOf(f relay.Fence) api.RelayFence {
	out := api.RelayFence{ID: f.ID(), DaemonID: f.DaemonID, Key: f.Key, Since: f.Since.UTC(), Code: f.Code, Cause: f.Cause, Jobs: f.Jobs,
		Remote: f.Remote, Incarnation: f.Incarnation, Metadata: f.Metadata}
	if out.Jobs == nil {
		out.Jobs = []string{}
	}
	for _, l := range f.Late {
		out.Late = append(out.Late, api.RelayLateFinish{JobID: l.JobID, At: l.At.UTC()})
	}
	return out
}

func outcomeOf(o relay.Outcome) api.RelayOutcome {
	out := api.RelayOutcome{Acknowledged: o.Acknowledged, Code: o.Code, Cause: o.Cause}
	if o.Fence != nil {
		f := fenceOf(*o.Fence)
		out.Fence = &f
	}
	return out
}
