from langbot_plugin.api.definition.components.tool.tool import Tool


class Echo(Tool):
    async def call(self, params, session, query_id):
        return params
