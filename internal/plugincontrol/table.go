package plugincontrol

import "github.com/stockade-run/stockade/internal/pluginwire"

// handlers is every action LangBot may ask for, and who answers it. Which of them
// are admitted, and in which scope, is decided before; see admit.
func (c *Control) handlers() map[string]handler {
	return map[string]handler{
		pluginwire.ActionPing:             ping,
		pluginwire.ActionFileChunk:        fileChunk,
		pluginwire.ActionSetRuntimeConfig: setRuntimeConfig,

		pluginwire.ActionReconcilePluginInstallations: reconcile,
		pluginwire.ActionApplyPluginInstallation:      apply,
		pluginwire.ActionRemovePluginInstallation:     remove,

		pluginwire.ActionListPlugins:         listPlugins,
		pluginwire.ActionGetPluginInfo:       getPluginInfo,
		pluginwire.ActionGetPluginLogs:       getPluginLogs,
		pluginwire.ActionGetDebugInfo:        getDebugInfo,
		pluginwire.ActionGetStorageAnalysis:  getStorageAnalysis,
		pluginwire.ActionPluginDiagnostic:    pluginDiagnostic,
		pluginwire.ActionGetPluginIcon:       getPluginIcon,
		pluginwire.ActionGetPluginReadme:     getPluginReadme,
		pluginwire.ActionGetPluginAssetsFile: getPluginAssetsFile,

		pluginwire.ActionListTools:      listComponents(KindTool, "tools", manifestOf),
		pluginwire.ActionListCommands:   listComponents(KindCommand, "commands", manifestOf),
		pluginwire.ActionCallTool:       callTool,
		pluginwire.ActionExecuteCommand: executeCommand,
		pluginwire.ActionEmitEvent:      emitEvent,
		pluginwire.ActionPageAPI:        pageAPI,

		pluginwire.ActionListRunners:      listComponents(runnerKind, "runners", describeRunner),
		pluginwire.ActionRunRunner:        runRunner(runnerKind, pluginwire.ActionRunRunner),
		pluginwire.ActionListAgentRunners: listComponents(agentRunnerKind, "runners", describeRunner),
		pluginwire.ActionRunAgent:         runRunner(agentRunnerKind, pluginwire.ActionRunAgent),

		pluginwire.ActionListKnowledgeEngines:    listKnowledgeEngines,
		pluginwire.ActionRetrieveKnowledge:       forward(pluginwire.ActionRetrieveKnowledge, []string{"retriever_name", "retrieval_context"}, defaults{"retriever_name": quote("")}),
		pluginwire.ActionRAGIngestDocument:       forward(pluginwire.ActionIngestDocument, []string{"context"}, nil),
		pluginwire.ActionRAGDeleteDocument:       forward(pluginwire.ActionDeleteDocument, []string{"kb_id", "document_id"}, nil),
		pluginwire.ActionRAGOnKBCreate:           forward(pluginwire.ActionOnKBCreate, []string{"kb_id", "config"}, defaults{"config": empty}),
		pluginwire.ActionRAGOnKBDelete:           forward(pluginwire.ActionOnKBDelete, []string{"kb_id"}, nil),
		pluginwire.ActionGetRAGCreationSettings:  settingsSchema("creation_schema"),
		pluginwire.ActionGetRAGRetrievalSettings: settingsSchema("retrieval_schema"),
		pluginwire.ActionListParsers:             listParsers,
		pluginwire.ActionParseDocument:           parseDocument,

		pluginwire.ActionInstallPlugin: installPlugin,
		pluginwire.ActionRestartPlugin: lifecycle((Legacy).Restart, "plugin restarted"),
		pluginwire.ActionDeletePlugin:  lifecycle((Legacy).Delete, "plugin removed"),
		pluginwire.ActionUpgradePlugin: lifecycle((Legacy).Upgrade, "plugin upgraded"),
	}
}
