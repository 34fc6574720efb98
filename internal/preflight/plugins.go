package preflight

import (
	"context"
	"strings"

	"github.com/stockade-run/stockade/internal/python"
)

// plugins looks for what the Plugin Runtime needs besides: an interpreter with
// the plugin SDK, and, for the profile shared, boxes. Nothing else needs either.
// soFar are the answers about boxes.
func plugins(ctx context.Context, interpreter string, soFar []Check) []Check {
	const interp, boxes = "Python with the plugin SDK", "boxes for plugin workers (profile shared)"
	i, err := python.Probe(ctx, interpreter)
	if err != nil {
		return []Check{
			nice(interp, false, clip(err.Error()), "apt-get install python3 python3-venv, or name another with --python"),
			nice(boxes, false, "there is no interpreter to show in them", "see "+interp),
		}
	}
	c := nice(interp, i.CheckSDK() == nil, i.String(), i.Path+" -m pip install "+python.SDKName)
	var lacks []string
	for _, m := range Missing(soFar) {
		lacks = append(lacks, m.Name)
	}
	switch {
	case !c.OK:
		return []Check{c, nice(boxes, false, "the interpreter has no plugin SDK", c.Fix)}
	case len(lacks) > 0:
		return []Check{c, nice(boxes, false, "missing: "+strings.Join(lacks, ", "), "bring what is missing above; the profile oss_dev does without boxes")}
	}
	return []Check{c, nice(boxes, true, "workers can run in boxes with every limit of a policy", "")}
}
